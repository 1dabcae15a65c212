"""The child processes of a node: they end with it, and nothing of our process runs between fork and
exec.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rayloop.launch.ray_process import child

RUN = "from rayloop.launch.ray_process import child; import os, sys\n"


def test_a_child_starts_although_a_library_crashes_after_a_fork() -> None:
    code = (
        "os.register_at_fork(after_in_child=os.abort); sys.exit(child(['true'],"
        " os.environ).wait(30))"
    )
    assert (
        subprocess.run([sys.executable, "-c", RUN + code], check=False, timeout=60).returncode == 0
    )


def test_a_child_ends_when_its_parent_is_killed() -> None:
    code = "one = child(['sleep', '300'], os.environ); print(one.pid, flush=True); sys.stdin.read()"
    parent = subprocess.Popen(
        [sys.executable, "-c", RUN + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    until = time.monotonic() + 30
    while process.name() != "sleep" and time.monotonic() < until:
        time.sleep(0.01)
    parent.kill()
    parent.wait(30)
    psutil.wait_procs([process], 30)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert child(["no-such-program"], os.environ, log).wait(30) == 127
    assert (tmp_path / "log").read_text(
        encoding="utf-8"
    ) == "no-such-program: No such file or directory\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program(number: int) -> None:
    one = child(["sleep", "300"], os.environ)
    one.send_signal(number)
    assert one.wait(30) == -number


ADOPTED = """
import subprocess, time, psutil
from rayloop.launch.signals import StopSignals
from rayloop.launch import node
from rayloop.sandbox.kernel import adopt_orphans

adopt_orphans()
program = child(["true"], os.environ)
ray = child(["sleep", "300"], os.environ)
leaver = "import subprocess; subprocess.Popen(['sleep', '1'])"
subprocess.run([sys.executable, "-c", leaver], check=True)
until = time.monotonic() + 60

def zombies():
    found = psutil.Process().children()
    return [one.pid for one in found if one.status() == psutil.STATUS_ZOMBIE]

def nobody_left():
    others = {one.pid for one in psutil.Process().children()} - {ray.pid}
    return not others or time.monotonic() > until

assert not nobody_left(), "the sleeper is adopted"
why = node.attend(ray, None, StopSignals(), nobody_left)
print(why.name, zombies(), program.poll(), ray.poll())
ray.kill()
"""


def test_a_node_waits_for_what_it_adopted_and_leaves_exit_codes_to_their_owners() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN + ADOPTED],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "HEAD_LEFT [] 0 None\n", done.stderr


def test_an_owner_gets_the_exit_code_of_a_child_that_was_seen_to_end() -> None:
    code = """
import time
from rayloop.launch.ray_process import reap
one = child(["sh", "-c", "exit 7"], os.environ)
os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
reap()
sys.exit(one.poll())
"""
    assert (
        subprocess.run([sys.executable, "-c", RUN + code], check=False, timeout=60).returncode == 7
    )
