"""Nothing is left behind when the host or the fork server is killed."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from rayloop.sandbox import levels
from rayloop.sandbox.options import Level

pytestmark = [pytest.mark.env, pytest.mark.timeout(60)]

HOST = """
import sys, threading, time
from rayloop.sandbox.host import Sandbox
from rayloop.sandbox.options import Level, Options
sandbox = Sandbox(Level(sys.argv[1]), Options(preload=()))
for code in ("while True: pass", "import time; time.sleep(600)", "x = 1"):
    threading.Thread(target=sandbox.interpreter().run, args=(code, 600), daemon=True).start()
time.sleep(0.5)
print("ready", sandbox.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["host", "fork server"])
@pytest.mark.parametrize("level", list(Level))
def test_nothing_is_left_of_a_sandbox(level: Level, victim: str) -> None:
    if levels.reached().short_of(level):
        pytest.skip(str(levels.reached()))
    host = subprocess.Popen([sys.executable, "-c", HOST, level], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        word, pid = host.stdout.readline().split()
        assert word == "ready"
        family = psutil.Process(host.pid).children(recursive=True)
        assert len(family) >= 4
        (psutil.Process(int(pid)) if victim == "fork server" else host).kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        host.kill()
        host.wait()
