"""Restarts of a program after a failure of the machines (exit code 69), and their budget."""

import math
import os
import subprocess
import time
from collections.abc import Sequence

from rayloop.core.failures import START_AGAIN_EXIT_CODE
from rayloop.launch import slurm_job
from rayloop.launch.ray_process import POLL_INTERVAL_S, child
from rayloop.launch.signals import STOP, StopSignals, handling

FIRST_PAUSE_S = 15.0
"""Seconds of the first pause, which doubles each time."""
MAX_PAUSE_S = 300.0
"""Seconds of the longest pause."""
RESTARTED = "RAYLOOP_RESTARTED"
"""Environment variable of programs that are started again after a failure."""
REFILL_S = 3600.0
"""Seconds in which an empty budget is full again."""


class Budget:
    """A token bucket: ``per_hour`` units, one comes back every ``REFILL_S / per_hour`` seconds.

    ``now`` is the time of a monotonic clock.
    """

    def __init__(self, per_hour: int) -> None:
        self.per_hour = per_hour
        self._units = float(per_hour)
        self._taken_at: float | None = None

    def left(self, now: float) -> float:
        """Units left, fractions included."""
        seconds = 0.0 if self._taken_at is None else now - self._taken_at
        return min(float(self.per_hour), self._units + seconds * self.per_hour / REFILL_S)

    def wait(self, now: float) -> float:
        """Seconds until a unit is left: 0 when one is, infinity for a budget of 0."""
        if not self.per_hour:
            return math.inf
        return max(0.0, (1.0 - self.left(now)) * REFILL_S / self.per_hour)

    def take(self, now: float) -> None:
        """Take one unit. Raises ValueError when none is left: ``wait`` first."""
        units = self.left(now)
        # Not 1, since a sleep may end a moment early.
        if units < 0.99:
            raise ValueError(f"the budget of {self.per_hour} an hour has {units:.3f} left")
        self._units = max(0.0, units - 1.0)
        self._taken_at = now


def is_restart() -> bool:
    """Whether this process was started after a failure.

    ``train --again``, ``node --requeue`` or Slurm do so.
    """
    return RESTARTED in os.environ or slurm_job.restarts() > 0


def backed_off(signals: StopSignals, before: int) -> bool:
    """Wait before another start; the pause doubles with every start ``before``.

    Returns False when a signal to end came.
    """
    seconds = min(FIRST_PAUSE_S * 2**before, MAX_PAUSE_S)
    print(f"the machines failed: once more in {seconds:g} s", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until and signals.first is None:
        time.sleep(POLL_INTERVAL_S)
    return signals.first is None or signals.near_limit()


def supervised(command: Sequence[str], times: int) -> int:
    """Run ``command``, and up to ``times`` times again while its exit code is 69.

    Returns the last exit code. Signals of ``STOP``, which may come twice, are passed on as SIGTERM,
    and nothing is started after them.
    """
    signals = StopSignals()
    with handling(signals, *STOP):
        for before in range(times + 1):
            environment = dict(os.environ)
            if before:
                environment[RESTARTED] = "1"
            code = _followed(child(command, environment), signals)
            ended = code != START_AGAIN_EXIT_CODE or signals.first is not None or before == times
            if ended or not backed_off(signals, before):
                break
            print(f"again, {before + 1} of {times}", flush=True)
    # A negative code is a signal, for which shells report 128 and its number.
    return code if code >= 0 else 128 - code


def _followed(program: subprocess.Popen[bytes], signals: StopSignals) -> int:
    """Wait for the program, and pass on each signal as SIGTERM. Returns its exit code."""
    sent = 0
    while program.poll() is None:
        received = (signals.first is not None) + signals.again
        if sent < received:
            program.terminate()
            sent += 1
        time.sleep(POLL_INTERVAL_S)
    return program.returncode
