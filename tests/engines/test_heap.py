"""Freed memory that stays with the process: its pages are not made again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: with huge pages there is hardly a fault to count
from rayloop.engines.machine import keep_freed
if sys.argv[1] == "kept":
    keep_freed()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * (256 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is tuned is glibc's malloc")
def test_a_second_block_of_a_size_costs_no_pages_anew() -> None:
    def run(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return int(done.stdout)

    assert run("kept") < 1000 < 20_000 < run("as it is")
