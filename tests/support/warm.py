"""Processes that are forked from one that has imported torch and a model's code.

A process that imports them itself spends more CPU time on that than most tests spend on their work.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTED = (
    "pytest",
    "rayloop.commands.train",
    "rayloop.engines.generation.transformers",
    "rayloop.engines.training.fsdp",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
)


def forks() -> ForkServerContext:
    """Return what makes processes in which ``IMPORTED`` is already imported.

    They are forked from one server. It ends with this process, and its environment variables are
    those of the moment at which it started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def rayloop(
    words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m rayloop`` with these words in ``folder``; return its exit code and output.

    Raises TimeoutError after five minutes.
    """
    own = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as kept:
        said, complained = Path(kept) / "stdout", Path(kept) / "stderr"
        process = forks().Process(
            target=_command, args=(list(words), folder, own, str(said), str(complained))
        )
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"rayloop {' '.join(words)} did not end within 300 seconds")
        return subprocess.CompletedProcess(
            list(words),
            process.exitcode,
            said.read_text(encoding="utf-8"),
            complained.read_text(encoding="utf-8"),
        )


def _command(
    words: list[str], folder: Path, environment: dict[str, str], said: str, complained: str
) -> None:
    for number, name in ((1, said), (2, complained)):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["rayloop", *words]
    sys.path.insert(0, str(folder))
    from rayloop.__main__ import main

    sys.exit(main())
