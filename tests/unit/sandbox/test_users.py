"""User numbers: a number that a process still has goes to no other program."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.envs.browser import containment
from rayloop.envs.browser.chromium import Chromium
from rayloop.envs.desktop import session
from rayloop.sandbox import bubblewrap, host
from rayloop.sandbox.bubblewrap import User
from rayloop.sandbox.frames import Channel
from rayloop.sandbox.options import Level, SandboxFailed

NAME = "\0sandbox-test-"
UNUSED = 2**31 - 7
"""A number that no process has."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[User]:
    """The users that are kept within the test."""
    found: list[User] = []
    monkeypatch.setattr(bubblewrap, "_claimed_until_exit", found)
    monkeypatch.setattr(User.close_when_unused, "__defaults__", (0.0,))
    return found


def claimed(number: int) -> tuple[User, Callable[[], bool]]:
    """A user with this number, and whether its claim still stands."""
    name = NAME + secrets.token_hex(8)
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    lock.bind(name)

    def stands() -> bool:
        gc.collect()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            try:
                other.bind(name)
            except OSError:
                return True
        return False

    return User(number, lock), stands


class Lingers:
    """A process that counts as alive after its kill."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int:
        self._process.wait()
        raise subprocess.TimeoutExpired("desktop", seconds)


def desktop(user: User) -> None:
    made = session.Desktop.__new__(session.Desktop)
    ours, theirs = socket.socketpair()
    theirs.close()
    made._channel, made._process, made._users = Channel(ours), Lingers(), [user]  # type: ignore[assignment]
    made.close()


def program(user: User) -> None:
    made = containment.Program.__new__(containment.Program)
    made._file, made._user = os.memfd_create("test"), user
    made.close()


def browser(user: User) -> None:
    made = containment.Program.__new__(containment.Program)
    made._file, made._user = os.memfd_create("test"), user
    connected = SimpleNamespace(is_connected=lambda: False)
    asyncio.run(Chromium(connected, None, made, containment.BrowserSettings()).close())


def fork_server(user: User) -> None:
    made = host._Server.__new__(host._Server)
    made._folder, made._user = "", user
    made._release()


def interpreter(user: User) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    # This process is the one that does not end: the test holds the signal back.
    made = host.Interpreter(
        ours, os.pidfd_open(os.getpid()), user, SimpleNamespace(alive=lambda: True)
    )  # type: ignore[arg-type]
    made.close()


def spawned_late(user: User) -> None:
    made = host._Server.__new__(host._Server)
    made._level = next(level for level in Level if level != Level.NAMESPACES)
    made._control, theirs = socket.socketpair()
    made._control.settimeout(0.01)
    with theirs, made._control, pytest.raises(SandboxFailed, match="does not answer"):
        made.spawn()


def lent(user: User) -> None:
    with bubblewrap.borrowed() as number:
        assert number == user.number


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> Callable[[User], None]:
    """Makes ``free_user`` give this user, as it does to root."""

    def given(user: User) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(bubblewrap, "free_user", lambda: user)

    return given


@pytest.mark.parametrize(
    "closes", [desktop, program, browser, fork_server, interpreter, spawned_late, lent]
)
def test_a_user_whose_processes_live_is_not_given_back(
    closes: Callable[[User], None],
    kept: list[User],
    as_root: Callable[[User], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user, stands = claimed(os.geteuid())  # this process has that number
    as_root(user)
    monkeypatch.setattr(host, "_EXIT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    closes(user)
    del user
    assert stands()
    kept.pop()._lock.close()


@pytest.mark.parametrize("closes", [desktop, program, browser, fork_server, lent])
def test_a_user_without_processes_is_given_back(
    closes: Callable[[User], None], kept: list[User], as_root: Callable[[User], None]
) -> None:
    user, stands = claimed(UNUSED)
    as_root(user)
    closes(user)
    assert not stands()
    assert kept == []


def test_a_user_is_given_back_after_its_last_process(
    monkeypatch: pytest.MonkeyPatch, kept: list[User]
) -> None:
    user, stands = claimed(UNUSED)
    looks = [True, True, False]

    def in_use(number: int) -> Any:
        assert stands()
        return looks.pop(0)

    monkeypatch.setattr(bubblewrap, "_in_use", in_use)
    user.close_when_unused(60)
    assert (looks, stands(), kept) == ([], False, [])
