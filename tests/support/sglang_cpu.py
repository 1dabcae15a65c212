"""SGLang's own release on a CPU: its wheel, gguf and orjson from the package index, beside what
vLLM's environment has.

Two packages are stand-ins that are empty: IPython, and sgl_kernel, whose kernels are for GPUs and
for AMX. What calls one of them fails; on other CPUs SGLang computes with torch
(``attention_backend: torch_native``).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.core.protocols import Manifest
from rayloop.core.types import Completion, Sampling, TokenPrompt, Version
from rayloop.engines.generation import sglang
from rayloop.engines.settings import EnginePlace, ModelSettings, SglangEngineSettings
from rayloop.transports.collective import BroadcastGroup, BroadcastReceiver
from rayloop.transports.plain import Arrays
from rayloop.transports.settings import CollectiveTransport
from tests.support.runs import ROOT

FOLDER = ROOT / "build" / f"sglang-{sglang.TESTED}"
EMPTY = """def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_, **__):
        raise NotImplementedError(f"{name} of a package that is not here")

    return absent
"""
EXTRA: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "context_length": 1024,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
}


def _installed() -> None:
    """Skips when the package index cannot be reached."""
    if (FOLDER / "whole").exists():
        return
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--upgrade",
        "--only-binary=:all:",
        "--target",
        str(FOLDER),
    ]
    machine = [
        "--python-version",
        "3.11",
        *(f"--platform=manylinux_{tag}_x86_64" for tag in ("2_34", "2_17")),
    ]
    done = subprocess.run(
        [*pip, *machine, f"sglang=={sglang.TESTED}", "gguf", "orjson"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"SGLang's wheel cannot be had here: {done.stderr[-500:]}")
    for name in ("IPython/display", "IPython", "sgl_kernel"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        (FOLDER / name / "__init__.py").write_text(EMPTY, encoding="utf-8")
    (FOLDER / "whole").touch()


class Rollout:
    """SglangEngine and a broadcast's receiver in a process of their own, as in a rollout actor;
    calls there return here.
    """

    def __init__(self, folder: Path, transport: CollectiveTransport, **extra: Any) -> None:
        _installed()
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self.pid: int = self._pool.submit(_start, str(folder), transport, EXTRA | extra).result(280)

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """``generate``, ``take``, ``load``, ``state``: the functions below."""
        return self._pool.submit(_call, name, *arguments)

    def schedulers(self) -> list[psutil.Process]:
        """The processes that hold the model."""
        every = psutil.Process(self.pid).children(recursive=True)
        return [each for each in every if "sglang::scheduler" in " ".join(each.cmdline())]

    def close(self) -> None:
        """All of its processes end."""
        with suppress(psutil.NoSuchProcess):
            for each in [
                *psutil.Process(self.pid).children(recursive=True),
                psutil.Process(self.pid),
            ]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Actor:
    runner: asyncio.Runner
    engine: Any
    receiver: BroadcastReceiver


def _start(folder: str, transport: CollectiveTransport, extra: dict[str, Any]) -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the test
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.path.append(str(FOLDER))  # which SGLang's own processes get from this one
    settings = SglangEngineSettings.model_validate(
        {"kind": "sglang", "dtype": "float32", "extra": extra}
    )
    _Actor.runner, _Actor.receiver = asyncio.Runner(), BroadcastReceiver(transport)

    async def make() -> None:
        _Actor.engine = sglang.SglangEngine(ModelSettings(path=folder), settings, EnginePlace())

    _Actor.runner.run(make())
    return os.getpid()


def _call(name: str, *arguments: Any) -> Any:
    return _Actor.runner.run(globals()[f"_{name}"](*arguments))


async def _generate(*requests: tuple[TokenPrompt, Sampling]) -> list[Completion]:
    return await asyncio.gather(*(_Actor.engine.generate(*request) for request in requests))


async def _take(
    version: Version, meeting: BroadcastGroup, *running: tuple[TokenPrompt, Sampling]
) -> list[Completion]:
    """Take a broadcast while requests are running. Returns their answers."""
    tasks = [asyncio.create_task(_Actor.engine.generate(*request)) for request in running]
    while _Actor.engine.health().running < len(running):
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3 if running else 0.0)
    await _Actor.receiver.take(_Actor.engine, Manifest(version, {}), meeting)
    assert not any(task.done() for task in tasks), "it came while they were sampled"
    return [await task for task in tasks]


async def _load(manifest: Manifest, arrays: Arrays) -> None:
    await _Actor.receiver.take(_Actor.engine, manifest, arrays)


async def _state() -> tuple[Version | None, str | None]:
    """The version that is served, and this process's broadcast group."""
    return _Actor.engine.health().version, _Actor.receiver._membership._name
