"""What a broadcast of weights moves by each way, from tensors on a device that is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.support.runs import ROOT

pytestmark = [
    pytest.mark.gpu_fake,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="g++ is not installed: it compiles the device"
    ),
    pytest.mark.timeout(300),
]


def test_weights_are_broadcast_from_the_device_and_cross_to_the_host_once() -> None:
    """Beside the broadcast, and two buckets are on the device at most, with the tensors that are
    gathered.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_fake.stream"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    size = found["weights"]
    largest = 2 * 4096 * 1024
    assert list(found["broadcast"]) == ["cuda"]
    assert size <= found["broadcast"]["cuda"] < 1.01 * size, "the rest are descriptions"
    to_host = {
        way: moved
        for way, moved in found["copied"].items()
        if way.endswith(("to cpu", "to cpu, beside"))
    }
    assert list(to_host) == ["cuda to cpu, beside"]
    assert size <= to_host["cuda to cpu, beside"] < 1.01 * size
    assert found["host"] == size
    assert (
        sum(moved for way, moved in found["copied"].items() if way.startswith("cpu to cuda"))
        < 0.01 * size
    )
    assert found["peak"] <= 2 * found["limit"] + 2 * largest + (1 << 20)
    assert not [wait for wait in found["waits"] if "cuda to cpu" in wait]
