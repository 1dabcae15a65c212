"""Starting a program again that the machines failed (exit code 69), after a while that grows, and not for ever."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

from rayloop.core.failures import AGAIN
from rayloop.core.signals import STOP, StopSignals, handling
from rayloop.launch.ray_process import POLL, child

BACKOFF, LONGEST = 15.0, 300.0
"""Seconds before the first start after a failure of the machines, and at most; each time twice as many."""


def backed_off(told: StopSignals, before: int) -> bool:
    """Wait, the longer the more starts there were ``before``: what failed may take a while. False when told to end meanwhile."""
    seconds = min(BACKOFF * 2**before, LONGEST)
    print(f"the machines failed: once more in {seconds:g} s", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until and told.first is None:
        time.sleep(POLL)
    return told.first is None or told.near_limit()


def supervised(command: Sequence[str], times: int) -> int:
    """Run ``command``, and again while its exit code is 69, ``times`` times at most. Returns the last exit code.

    SIGTERM and SIGINT, which may come twice, are handed on, and there is no other start after them.
    """
    told = StopSignals()
    with handling(told, *STOP):
        for before in range(times + 1):
            program = child(command, os.environ)
            code = _followed(program, told)
            if code != AGAIN or told.first is not None or before == times or not backed_off(told, before):
                break
            print(f"again, {before + 1} of {times}", flush=True)
    return code if code >= 0 else 128 - code


def _followed(program: subprocess.Popen[bytes], told: StopSignals) -> int:
    sent = 0
    while program.poll() is None:
        if sent < (told.first is not None) + told.again:
            program.terminate()
            sent += 1
        time.sleep(POLL)
    return program.returncode
