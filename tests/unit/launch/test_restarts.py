"""A program that the machines failed is started again, one that was stopped is not, and signals
reach it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from rayloop.launch import restarts
from rayloop.launch.restarts import supervised

COUNTS = """
import sys, pathlib
file = pathlib.Path(sys.argv[1])
codes = file.read_text().split()
file.write_text(" ".join(codes[1:]))
sys.exit(int(codes[0]))
"""
SAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(restarts, "POLL_INTERVAL_S", 0.01)


@pytest.mark.parametrize(
    ("codes", "ends", "left"),
    [
        ("0 5", 0, "5"),
        ("69 69 0 5", 0, "5"),
        ("69 69 69 5", 69, "5"),
        ("69 1 5", 1, "5"),
        ("75 5", 75, "5"),
    ],
)
def test_what_the_machines_failed_is_started_again_and_not_for_ever(
    tmp_path: Path, codes: str, ends: int, left: str
) -> None:
    (tmp_path / "codes").write_text(codes, encoding="utf-8")
    assert supervised([sys.executable, "-S", "-c", COUNTS, str(tmp_path / "codes")], 2) == ends
    assert (tmp_path / "codes").read_text(encoding="utf-8") == left


@pytest.mark.parametrize("code", [75, 69])
def test_a_stop_is_handed_on_and_is_the_end(tmp_path: Path, code: int) -> None:
    ready = tmp_path / "ready"

    def stop() -> None:
        while not ready.exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert supervised([sys.executable, "-S", "-c", SAVES, str(ready), str(code)], 5) == code


def test_a_program_that_is_killed_has_the_exit_code_of_a_shell() -> None:
    assert supervised([sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"], 5) == 137
