"""Local desktops: tasks solved as a person would, exact typing, what dies and what is left, limits,
and many at once.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.desktop.environment import DesktopTasks
from rayloop.envs.desktop.session import Desktop, DesktopLimits, DesktopLost, missing
from rayloop.envs.desktop.tasks import SHIPPED, task_file
from rayloop.envs.grammar.actions import (
    Action,
    Actions,
    Click,
    Drag,
    Hotkey,
    MouseButton,
    Point,
    Scroll,
    Type,
)
from rayloop.envs.grammar.screens import Pointing
from rayloop.envs.grammar.ui_tars import write
from tests.envs.desktop_solutions import SOLUTIONS, key, typed
from tests.support.runs import eventually

LACKS = missing()
pytestmark = [pytest.mark.env, pytest.mark.skipif(bool(LACKS), reason=f"missing here: {LACKS}")]
NOTES = "Documents/notes.txt"
ROOT = Path(__file__).parents[2]
AT_ONCE = 4


@contextmanager
def desktop(**limits: Any) -> Iterator[Desktop]:
    made = Desktop(DesktopLimits(**limits))
    try:
        yield made
    finally:
        made.close()


@contextmanager
def episode(name: str, **settings: Any) -> Iterator[DesktopTasks]:
    environment = DesktopTasks(DesktopTasks.Settings.model_validate({"react": 2.0, **settings}))
    try:
        prompt = Message("user", ("Do this: {instruction}",))
        [message] = environment.reset(Task("t", (prompt,), extra={"desktop": name})).messages
        assert message.parts[0] == f"Do this: {task_file(SHIPPED).tasks[name].instruction}"
        assert picture(message.parts[1]).size == (1280, 800)
        yield environment
    finally:
        environment.close()


def picture(part: str | ImageSource) -> Image.Image:
    assert isinstance(part, ImageSource)
    assert part.data is not None
    return Image.open(io.BytesIO(part.data))


def inside(of: Desktop) -> list[psutil.Process]:
    """All processes of a desktop, the first ones first."""
    return psutil.Process(of._process.pid).children(recursive=True)


def named(of: Desktop, name: str) -> psutil.Process:
    return next(process for process in inside(of) if process.name() == name)


def gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def in_terminal(of: Desktop, command: str, wait_for: str, seconds: float = 15) -> str:
    """What a command, run in a terminal, writes to a file of the home."""
    of.launch(["xterm"])
    of.type(f"({command}) > {wait_for}.part 2>&1; mv {wait_for}.part {wait_for}\n", 0.001, 0.1)

    def written() -> bytes | None:
        entry = of.home().get(wait_for)
        return (entry.content or b"-") if entry else None

    found: bytes = eventually(written, command, seconds, 0.1)
    return found.decode()


# Tasks --------------------------------------------------------------------------------------------


def test_every_shipped_task_is_solved_and_not_by_doing_nothing() -> None:
    assert len(SOLUTIONS) >= 12
    assert set(SOLUTIONS) == set(task_file(SHIPPED).tasks)

    def solve(name: str, pause: float) -> tuple[float, list[str | None], float]:
        with episode(name, pause=pause) as environment:
            before = environment.evaluate()
            errors = [
                environment.step(f"Thought: go on\nAction: {turn}").error
                for turn in SOLUTIONS[name]
            ]
            assert environment.step("Action: finished(content='done')").done
            return before, errors, environment.evaluate()

    def solved(name: str) -> None:
        before, errors, after = solve(name, 0.1)
        if after == 0.0:  # on a busy machine a program may follow late, and a script does not look
            _, errors, after = solve(name, 1.0)
        assert (before, after) == (0.0, 1.0), name
        assert not any(errors), name

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(solved, SOLUTIONS))


def test_what_the_policy_does_wrong_is_an_error_it_can_read() -> None:
    with episode("sort-lines", max_actions=2) as environment:
        for said, why in (
            ("no action", "Action:"),
            ("Action: press_home()", "no PhoneButton"),
            ("Action: wait()\n\nwait()\n\nwait()", "3 actions in one turn, 2 are allowed"),
            (f"Action: {typed('x' * 4001)}", "at most 4000 characters"),
            ("Action: type(content='\\x00')", ""),
        ):
            step = environment.step(said)
            if why:
                assert step.error
                assert why in step.error
            assert not step.done
            assert step.observation
        partly = environment.step("Action: wait()\n\npress_back()")
        assert partly.error
        assert partly.observation
        assert picture(partly.observation.messages[0].parts[1]).size == (1280, 800)
        assert environment.evaluate() == 0.0
    with pytest.raises(DataFailure, match="no task of"):
        environment.reset(Task("t", (Message("user", ("x",)),), extra={"desktop": "no-such"}))


def test_actions_that_are_made_of_others_have_their_effect() -> None:
    settled: tuple[Action, ...] = (
        Click(Point(400, 300)),
        Type("x", clear=True),
        Hotkey(("ctrl", "s")),
    )
    with episode("delete-word") as environment:
        for action in (
            Drag(Point(400, 300), Point(500, 300), path=(Point(450, 350),)),
            Drag(None, Point(400, 300)),
            MouseButton(True),
            MouseButton(False),
            Click(times=3),
            Click(button="middle"),
            Click(button="back"),
            Scroll("down", Point(400, 300), 300, "pixels"),
        ):
            assert environment._carry_out([action]).error is None
        assert environment._desktop is not None
        assert environment._carry_out(settled).error is None
        home = environment._desktop.home()
        assert b"x" in {entry.content.strip() for entry in home.values() if entry.content}


def test_coordinates_are_those_that_the_model_sees() -> None:
    word = Click(Point(337, 204), times=2)
    relative, absolute = Pointing(coordinates="relative"), Pointing(max_pixels=500_000)
    for meant, taken, result in (
        (relative, relative, 1.0),
        (absolute, absolute, 1.0),
        (absolute, relative, 0.0),
    ):
        with episode("delete-word", pointing=taken.model_dump()) as environment:
            for action in (
                meant.written(word, 1280, 800),
                Hotkey(("delete",)),
                Hotkey(("ctrl", "s")),
            ):
                assert environment.step(write(Actions("", (action,)))).error is None
            assert environment.evaluate() == result


# Typing -------------------------------------------------------------------------------------------

ASCII = "".join(map(chr, range(32, 127)))
TEXTS = {
    "ascii": f"line one\nline\ttwo\n\n{ASCII * 3}",
    "mixed": "äöü € 日本 — “quoted” ñ é ß Ω ½ " * 3,
    "more than free keycodes": (
        "".join(map(chr, range(0x4E00, 0x4E00 + 300))) + " and back: 一丁 abc"
    ),
}


@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_typing_is_exact(delay: float) -> None:
    with desktop() as one:
        one.put(NOTES, b"")
        one.launch(["mousepad", NOTES])
        one.screenshot(settle=2)
        for name, text in TEXTS.items():
            one.ask("press", keys=["ctrl", "a"])
            one.type(text, delay, 0.1)
            one.screenshot(settle=2)
            one.ask("press", keys=["ctrl", "s"])
            for _ in range(40):
                found = (one.home()[NOTES].content or b"").decode().removesuffix("\n")
                if found == text:
                    break
                time.sleep(0.2)
            assert found == text, name


# Starts and ends ----------------------------------------------------------------------------------


def test_forty_starts_with_a_window_each() -> None:
    """openbox loses windows that map while it starts: 5 of 40 when nobody waits for it."""

    def start(_: int) -> int:
        with desktop() as one:
            one.launch(["xterm"])
            return 1

    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert sum(pool.map(start, range(40))) == 40


def test_a_killed_x_server_is_a_lost_desktop_and_the_next_one_works() -> None:
    with episode("sort-lines") as environment:
        assert environment._desktop
        named(environment._desktop, "Xvfb").kill()
        with pytest.raises(DesktopLost):
            environment.step(f"Action: {key('a')}")
        with pytest.raises(DesktopLost):
            environment.evaluate()
    with episode("sort-lines") as environment:
        assert environment.step(f"Action: {key('a')}").error is None


def test_an_x_server_that_hangs_is_lost_at_the_deadline() -> None:
    with desktop(call_timeout=1.0) as one:
        server = named(one, "Xvfb")
        server.suspend()
        started = time.monotonic()
        with pytest.raises(DesktopLost, match="no answer within"):
            one.screenshot()
        assert time.monotonic() - started < 5
        left = inside(one)
    eventually(gone(left), "the end of a desktop that hung", 10)


def test_close_leaves_nothing() -> None:
    with desktop() as one:
        one.launch(["xterm"])
        left = [psutil.Process(one._process.pid), *inside(one)]
        left[1].suspend()  # the driver: it need not help
        assert {"Xvfb", "openbox", "xterm"} <= {process.name() for process in left}
    eventually(gone(left), "the desktop's end", 10)


HOST = """
import sys, time
from rayloop.envs.desktop.session import Desktop
from rayloop.envs.desktop.session import DesktopLimits
one = Desktop(DesktopLimits())
one.launch(["xterm"])
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_host_leaves_nothing(how: signal.Signals) -> None:
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as host:
        assert host.stdout
        assert host.stdout.readline() == b"up\n"
        left = psutil.Process(host.pid).children(recursive=True)
        assert {"Xvfb", "xterm"} <= {process.name() for process in left}
        host.send_signal(how)
        host.wait(10)
        eventually(gone(left), "the desktop's end", 10)


# What the policy can do to it ---------------------------------------------------------------------


def test_a_link_in_the_home_leads_nowhere() -> None:
    secret = Path("/etc/hostname")
    with desktop() as one:
        found = in_terminal(
            one,
            f"ln -s {secret} answer.txt; ln -s / root; mkfifo pipe; cat {secret}; ls /root",
            "seen",
        )
        home = one.home()
        assert home["answer.txt"].kind == home["root"].kind == home["pipe"].kind == "other"
        assert home["answer.txt"].content is None
        assert not any(path.startswith("root/") for path in home)
        assert len(found.splitlines()) <= 2, found
        assert "No such file" in found


def test_no_network_no_root_and_no_checks_inside() -> None:
    script = (
        "id -u; cat /proc/net/route | wc -l; find / -name 'tasks.yaml' 2>/dev/null | wc -l; ls"
        " /proc | grep -c '^[0-9]'"
    )
    with desktop() as one:
        uid, routes, checks, processes = in_terminal(one, script, "seen").split()
    assert uid != "0"
    assert routes in ("0", "1")
    assert checks == "0"
    assert int(processes) < 30


FORKS = (
    "my @c; for (1..200) { my $p = fork(); last unless defined $p; if (!$p) { sleep 60; exit } push"
    " @c, $p }"
)
FILLS = 'for (1..5) { if (!fork()) { my $x = "x" x 200_000_000; sleep 60; exit } } sleep 60'
CLOSES_CONNECTIONS = (
    'import socket,struct;s=socket.socket(1);s.connect("/tmp/.X11-unix/X0");'
    's.send(struct.pack("<BxHHHHxx",108,11,0,0,0));s.recv(9999);'
    '[s.send(struct.pack("<BxHI",113,2,n<<21)) for n in range(1,9)];s.recv(9)'
)
"""KillClient (X11 protocol, 10.4) for all clients, the driver among them."""
ENDED = (
    "(the window manager|the driver's connection to the screen) was ended|all programs were ended"
    " by a signal"
)
"""Which of them is noticed first differs; the last one is an ordinary user's, whose X is not out of
reach.
"""
LIMITS = f"""
perl -e '{FORKS} print scalar @c, "\\n"; kill 9, @c'
dd if=/dev/zero of=/dev/null bs=1G count=1
head -c 20M /dev/zero > big
stat -c %s big
"""


def test_memory_processes_and_files_are_limited() -> None:
    with desktop(processes=64, memory_mb=768, home_mb=8) as one:
        one.put("try.sh", LIMITS.encode())
        children, *said, size = in_terminal(one, "bash try.sh", "seen", 30).splitlines()
        assert 20 < int(children) < 64
        assert any("memory exhausted" in line for line in said), said
        assert any("No space left" in line for line in said), said
        assert int(size) <= 8 << 20
        one.screenshot()


def broken(environment: DesktopTasks, *turns: str) -> str:
    """The error with which the episode ends, after ``turns``; it is not looked at any more."""
    for turn in itertools.chain(turns, itertools.repeat("wait()", 60)):
        step = environment.step(f"Action: {turn}")
        if step.done:
            assert environment.evaluate() == 0.0
            return step.error or ""
    return "never"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("kill -9 -1", ENDED),
        ("kill -9 -1; echo and more than one line is typed meanwhile", ENDED),
        ("openbox --exit", "the window manager was ended"),
        (f"python3 -c '{CLOSES_CONNECTIONS}'", ENDED),
        (f"perl -e '{FILLS}'", "MiB together, of at most 512"),
    ],
    ids=[
        "kill all",
        "kill all while typing",
        "end the window manager",
        "end all connections",
        "fill memory",
    ],
)
def test_what_the_policy_breaks_is_its_own_failure(command: str, why: str) -> None:
    """Not one of infrastructure, which would be played again and earn nothing."""
    with episode("sort-lines", limits={"total_mb": 512}, type_delay=0.01) as environment:
        assert re.search(why, broken(environment, typed(f"{command}\n")))
        assert environment._desktop
        environment._desktop.home()


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has no second user number for X")
def test_programs_cannot_reach_the_x_server() -> None:
    with desktop() as one:
        tries = (
            "pkill -9 Xvfb; kill -9 1; ls /proc/$(pgrep Xvfb)/fd; ls -l /proc/$$/fd; cat"
            " /proc/1/mem"
        )
        found = in_terminal(one, tries, "seen")
        assert named(one, "Xvfb").is_running()
        assert "Operation not permitted" in found
        assert found.count("Permission denied") == 2, found
        assert "socket:" not in found, "the driver's connection to the host"
        one.screenshot()


# Many at once -------------------------------------------------------------------------------------


def pss(process: psutil.Process) -> float:
    """MiB of a process, shared pages counted in proportion."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def tree(desktop: Desktop) -> list[psutil.Process]:
    """The sandbox of a desktop and every process in it."""
    return [psutil.Process(desktop._process.pid), *inside(desktop)]


def timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def test_twelve_at_once() -> None:
    """``-k twelve -s`` prints the times and the memory.

    Only our own share has a limit: what Xvfb, openbox and an editor take is Debian's.
    """
    desktops: list[Desktop] = []
    try:
        ups = [timed(lambda: desktops.append(Desktop(DesktopLimits()))) for _ in range(12)]
        for one in desktops:
            one.put(NOTES, b"hello\n")
        editors = [timed(lambda one=one: one.launch(["mousepad", NOTES])) for one in desktops]
        for one in desktops:
            one.screenshot(settle=2)
        shots = [timed(one.screenshot) * 1e3 for one, _ in itertools.product(desktops, range(3))]
        clicks = [timed(lambda one=one: one.ask("click", x=600, y=400)) * 1e3 for one in desktops]
        memory = [(process.name(), pss(process)) for one in desktops for process in tree(one)]
    finally:
        closes = [timed(one.close) for one in desktops]
    for what, values, unit in (
        ("desktop up", ups, "s"),
        ("editor's window", editors, "s"),
        ("screenshot as PNG", shots, "ms"),
        ("click", clicks, "ms"),
        ("close", closes, "s"),
    ):
        print(f"{what}: median {statistics.median(values):.3g}, slowest {max(values):.3g} {unit}")
    whole = sum(mib for _, mib in memory)
    ours = sum(mib for name, mib in memory if name.startswith("python"))
    print(f"12 desktops with an editor each: {whole:.0f} MiB PSS, {ours:.0f} of it in Python")
    assert 0 < ours < 12 * 32
