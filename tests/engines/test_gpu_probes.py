"""The probes of benchmarks/gpu on a CPU with tiny sizes: each figure comes out, and what fails does
not take the others with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import PROBES
from benchmarks.gpu.result import Found, Place, Skipped, record

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]


def tried(name: str, folder: Path) -> dict[str, Any]:
    """What a probe leaves in its file, where Ray and vLLM cannot be imported."""
    program = (
        "import sys; sys.modules['ray'] = sys.modules['vllm'] = None\nfrom benchmarks.gpu.__main__"
        f" import main\nsys.exit(main([{name!r}, '--tiny', '--models', {str(folder / 'models')!r},"
        f" '--out', {str(folder / 'gpu.json')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))["probes"][
        name
    ]
    return found


@pytest.mark.gpu_fake
def test_the_trainer_s_figures_come_out_without_ray_and_vllm(tmp_path: Path) -> None:
    found = tried("trainer", tmp_path)
    assert (found["status"], found["tiny"]) == ("measured", True)
    assert {"machine", "gpus", "packages", "commit"} <= found["environment"].keys()
    assert "error" not in json.dumps(found["figures"])
    update = found["figures"]["update, micro-batches of 64 tokens, checkpointing on"]
    assert update["tokens_per_s"] > 0
    assert 0 < update["mfu"] < 1
    assert found["figures"]["waits in an update of one micro-batch"]["aten::nonzero"] > 0
    assert found["figures"]["packed and shared against one by one"]["logprob_gap_max"] < 0.1
    assert found["figures"]["what a weight update and a checkpoint need"]["restored_equal"]


@pytest.mark.gpu_fake
def test_a_member_that_never_comes_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    figures = tried("groups", tmp_path)["figures"]
    assert figures["a group of one"]["answer"]["made_s"] >= 0
    assert figures["the second of two never comes"]["error"].startswith("RuntimeError")
    assert figures["two members"]["second"]["answer"] is True
    dying = figures["the second member dies before the broadcast"]
    assert dying["second"]["died"] < 0
    assert "RuntimeError" in dying["first"]["error"]


def test_every_probe_is_in_the_readme_with_its_needs_and_limit() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| .* \| (.*?) ?\| (\d+) \|$",
        (ROOT / "benchmarks/gpu/README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert rows == [(name, probe.needs, f"{probe.limit:g}") for name, probe in PROBES.items()]
    assert len(PROBES) == 11


def test_what_a_failed_probe_had_found_stays_beside_the_others(tmp_path: Path) -> None:
    file, place = tmp_path / "out" / "gpu.json", Place(tmp_path, tiny=True)

    def fails(place: Place) -> Found:
        yield "first", 1
        raise ValueError("no second")

    def lacks(place: Place) -> Found:
        raise Skipped("no GPU")
        yield

    assert record(file, "lacks", lacks, place)
    assert not record(file, "fails", fails, place)
    probes = json.loads(file.read_text(encoding="utf-8"))["probes"]
    assert (probes["lacks"]["status"], probes["lacks"]["why"]) == ("skipped", "no GPU")
    assert (probes["fails"]["status"], probes["fails"]["figures"]) == ("failed", {"first": 1})
    assert "no second" in probes["fails"]["why"]
    assert all("command" in probe and "environment" in probe for probe in probes.values())


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_can_be_found(name: str) -> None:
    import pkgutil

    assert callable(pkgutil.resolve_name(PROBES[name].run))
