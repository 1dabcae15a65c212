"""Restarts of a program after a failure of the machines (exit code 69), with a growing pause, a limited number of times."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

from rayloop.core.failures import AGAIN
from rayloop.core.signals import STOP, StopSignals, handling
from rayloop.launch.ray_process import POLL, child

BACKOFF, LONGEST = 15.0, 300.0
"""Seconds of the first pause, which doubles each time, and of the longest."""


def backed_off(signals: StopSignals, before: int) -> bool:
    """Wait before another start; the pause doubles with every start ``before``. Returns False when a signal to end came."""
    seconds = min(BACKOFF * 2**before, LONGEST)
    print(f"the machines failed: once more in {seconds:g} s", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until and signals.first is None:
        time.sleep(POLL)
    return signals.first is None or signals.near_limit()


def supervised(command: Sequence[str], times: int) -> int:
    """Run ``command``, and again while its exit code is 69, ``times`` times at most. Returns the last exit code.

    SIGTERM and SIGINT, which may come twice, are passed to it as SIGTERM, and nothing is started after them.
    """
    signals = StopSignals()
    with handling(signals, *STOP):
        for before in range(times + 1):
            program = child(command, os.environ)
            code = _followed(program, signals)
            if code != AGAIN or signals.first is not None or before == times or not backed_off(signals, before):
                break
            print(f"again, {before + 1} of {times}", flush=True)
    return code if code >= 0 else 128 - code


def _followed(program: subprocess.Popen[bytes], signals: StopSignals) -> int:
    sent = 0
    while program.poll() is None:
        if sent < (signals.first is not None) + signals.again:
            program.terminate()
            sent += 1
        time.sleep(POLL)
    return program.returncode
