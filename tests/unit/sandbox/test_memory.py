"""What processes fill is seen, whichever way they fill it, and the dead do not count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayloop.sandbox import memory

MIB = 1 << 20
SIZE = 96 * MIB
BEGIN = f"import mmap, os, sys, threading, time\nn = {SIZE}; page = b'x' * 4096 * 256\n"
FILL = "for k in range(0, n, len(page)): m[k:k + len(page)] = page\n"
WAYS = {
    "private": "m = bytearray(n)\n" + FILL,
    "shared": "m = mmap.mmap(-1, n)\n" + FILL,
    "a memfd that is written": (
        "f = os.memfd_create('x')\nfor k in range(0, n, len(page)): os.write(f, page)\n"
    ),
    "a memfd that is mapped": (
        "f = os.memfd_create('x'); os.ftruncate(f, n); m = mmap.mmap(f, n)\n" + FILL
    ),
    "a file in memory": (
        "f = os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR); os.ftruncate(f, n); m = mmap.mmap(f,"
        " n)\n" + FILL
    ),
    "System V": (
        "import ctypes; L = ctypes.CDLL(None); L.shmat.restype = ctypes.c_void_p\ni = L.shmget(0,"
        " ctypes.c_size_t(n), 0o1600)\na = L.shmat(i, None, 0); L.shmctl(i, 0, None)\nfor k in"
        " range(0, n, len(page)): ctypes.memmove(a + k, page, len(page))\n"
    ),
    "a child of a child": "m = bytearray(n)\n" + FILL + "os.fork() == 0 and time.sleep(60)\n",
}
SAY = "print('full', flush=True)\ntime.sleep(60)\n"
FIRST_THREAD_ENDS = (
    "m = bytearray(n)\n"
    + FILL
    + "def stay():\n    time.sleep(0.3); print('full', flush=True); time.sleep(60)\n"
    "import ctypes; threading.Thread(target=stay).start(); ctypes.CDLL(None).syscall(60, 0)\n"
)


@contextmanager
def running(code: str, *line: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*line, sys.executable, "-c", BEGIN + code], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process
        finally:
            for pid in reversed(memory.tree(process.pid)):
                os.kill(pid, 9)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_counted(way: str) -> None:
    with running(WAYS[way] + SAY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        pids = memory.tree(process.pid)
        assert memory.filled(*pids) >= SIZE
        assert memory.beyond(SIZE // 2, pids) >= SIZE * 0.9
        assert memory.beyond(8 * SIZE, pids) == 0


def test_pages_that_a_fork_shares_count_once_for_the_limit() -> None:
    with running(
        WAYS["private"] + "for _ in range(3): os.fork() == 0 and time.sleep(60)\n" + SAY
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        pids = memory.tree(process.pid)
        assert len(pids) == 4
        assert memory.filled(*pids) >= 4 * SIZE
        assert memory.beyond(2 * SIZE, pids) == 0


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_memory_of_a_process_whose_first_thread_has_ended_is_counted() -> None:
    with running(FIRST_THREAD_ENDS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        assert memory.filled(process.pid) >= SIZE
        assert memory.lives(process.pid)


def test_a_process_that_has_ended_does_not_live() -> None:
    with subprocess.Popen(["true"]) as process:
        until = time.monotonic() + 30
        while memory.lives(process.pid):
            assert time.monotonic() < until
        assert os.path.exists(f"/proc/{process.pid}"), "nobody has asked for it"
        assert memory.filled(process.pid) == 0
    assert not memory.lives(process.pid)


def test_a_cgroup_holds_what_is_started_in_it_where_one_can_be_made() -> None:
    with memory.bounded(SIZE // 2) as group:
        if not group:
            pytest.skip("this user may make no cgroup here")
        folder = str(Path(group).parent)
        joined = ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', group]
        with running(WAYS["shared"] + SAY, *joined) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "", "it was ended before it was full"
            assert process.wait(30) == -9
        assert memory.kernel_kills(folder) == 1
        assert memory.limit_was_reached(folder)
        assert not memory.machine_was_short(folder, 0)
    assert not Path(folder).exists()


OOM = "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"


@pytest.mark.parametrize(
    ("events", "refused"),
    [
        ({"memory.events": "low 0\nhigh 0\nmax 40\noom 2\noom_kill 1\n"}, True),
        ({"memory.events": "low 0\nhigh 0\nmax 40\noom 0\noom_kill 1\n"}, False),
        (
            {
                "memory.oom_control": OOM,
                "memory.max_usage_in_bytes": "104857600",
                "memory.limit_in_bytes": "104857600",
            },
            True,
        ),
        (
            {
                "memory.oom_control": OOM,
                "memory.max_usage_in_bytes": "52428800",
                "memory.limit_in_bytes": "104857600",
            },
            False,
        ),
    ],
)
def test_a_process_that_the_kernel_ended_was_at_its_limit_or_the_machine_was_short(
    tmp_path: Path, events: dict[str, str], refused: bool
) -> None:
    for name, text in events.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert memory.kernel_kills(str(tmp_path)) == 1
    assert memory.limit_was_reached(str(tmp_path)) is refused
    assert memory.machine_was_short(str(tmp_path), 0) is not refused


def test_what_the_kernel_ended_elsewhere_does_not_concern_a_cgroup_of_which_it_ended_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "memory.events").write_text("oom 0\noom_kill 0\n", encoding="utf-8")
    before = memory.kernel_kills() - 1
    assert not memory.machine_was_short(str(tmp_path), before)
    assert memory.machine_was_short("", before), "without a cgroup nobody can tell whose it was"
