"""The project's own tests with the GPU visible: everywhere that a tensor lies on the wrong device,
most faults per minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.children import Child, completed
from benchmarks.gpu.engine import ENGINE_TIMEOUT_S, engine
from benchmarks.gpu.result import Found, Place, Skipped

ROOT = Path(__file__).parents[2]
TRAINER = [
    "tests/engines",
    "tests/contracts/test_engine.py",
    "-k",
    "not ranks and not page and not (vllm or sglang or openai)",
]
"""Not the tests of several ranks, which need as many GPUs."""
VLLM = ["-m", "vllm", "tests/contracts/test_engine.py", "tests/engines/test_vllm_engine.py"]
HELD_SHARE = 0.2
"""Share of the GPU that another process holds while an engine starts."""


TESTS_TIMEOUT_S = 850.0
"""Seconds for one run of tests; a test that hangs is ended by pytest after 300."""


def trainer_suite(place: Place) -> Found:
    """Trainer, decoder, attention and weights, without Ray and vLLM."""
    yield "tests", tests(["tests/engines/test_weights.py"] if place.tiny else TRAINER, {})


def contract(place: Place) -> Found:
    """vLLM against what an engine owes, without compilation: log-probs, end tokens, reload of every
    part, death of a process.
    """
    yield "eager", tests([*VLLM, *(["-k", "dead_worker"] if place.tiny else [])], {})


def graphs(place: Place) -> Found:
    """The same with compilation and CUDA graphs, with vLLM's other model runner, and an engine
    beside somebody else's memory.
    """
    import torch

    if not torch.cuda.is_available():
        raise Skipped("no GPU")
    yield "compiled", tests(VLLM, {"RAYLOOP_TEST_VLLM": "{}"})
    yield "the first model runner", tests(VLLM, {"VLLM_USE_V2_MODEL_RUNNER": "0"})
    holder = Child(hold, HELD_SHARE)
    try:
        found = Child(
            engine, str(models.vlm(place)), place.tiny, {"enforce_eager": True}, {}
        ).answer(ENGINE_TIMEOUT_S)
    finally:
        holder.end()
    yield (
        f"an engine with kv_cache_memory_bytes while another process holds {HELD_SHARE:.0%}",
        found,
    )


def tests(arguments: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and the names and ends of failed tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--timeout=300",
            f"--junitxml={report}",
            *arguments,
        ]
        try:
            done = completed(
                command,
                TESTS_TIMEOUT_S,
                cwd=ROOT,
                env={**os.environ, **variables},
                stdout=sys.stderr,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {TESTS_TIMEOUT_S:g} s"}
        if not report.exists():
            raise Skipped(
                f"pytest ended with {done.returncode} and left no report: its output says why"
            )
        cases = list(tree.parse(report).iter("testcase"))
    failed = {
        f"{case.get('classname')}::{case.get('name')}": _why(case)
        for case in cases
        if _ends(case, "failure", "error")
    }
    skipped = sum(_ends(case, "skipped") for case in cases)
    return {
        "tests": len(cases),
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": failed,
    }


def _ends(case: tree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def _why(case: tree.Element) -> str:
    return "\n".join(
        (one.text or one.get("message") or "")[-1500:]
        for one in case
        if one.tag in ("failure", "error")
    )


def hold(share: float) -> None:
    """Take a share of the GPU's memory, and keep it until this process is ended."""
    import time

    import torch

    kept = torch.empty(
        int(share * torch.cuda.get_device_properties(0).total_memory),
        dtype=torch.uint8,
        device="cuda",
    )
    time.sleep(2 * ENGINE_TIMEOUT_S)
    del kept
