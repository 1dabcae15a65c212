"""User numbers without a name: one for each program that root starts, so that it is not root and shares no file with anybody."""

from __future__ import annotations

import functools
import itertools
import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import contextmanager

USERS = range(61184, 65520)
"""What systemd keeps for users without a name; below 65,536, so that a rootless container has them too."""
_next = itertools.count(os.getpid() * 61)


class NoUser(OSError):
    """There is no free user number, or this process may not become another user."""


class User:
    """A user number, for this process alone until ``close`` or its end."""

    def __init__(self, number: int, lock: socket.socket) -> None:
        self.number, self._lock = number, lock

    def close(self) -> None:
        """Give the number back."""
        self._lock.close()


@contextmanager
def borrowed() -> Iterator[int | None]:
    """A number for a program that root starts, as long as it is needed; None for another user. Raises NoUser."""
    if os.geteuid() != 0:
        yield None
        return
    user = free_user()
    try:
        yield user.number
    finally:
        user.close()


def free_user() -> User:
    """A number without a name, a process or another claim. Raises NoUser. Only root has use for it.

    The claim is the name of an abstract socket: the kernel frees it when the process ends, however that ends.
    """
    taken, mapped = _taken(), _mapped()
    for _ in USERS:
        number = USERS[next(_next) % len(USERS)]
        if number in taken or number >= mapped:
            continue
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0sandbox-user-{number}")
        except OSError:
            lock.close()
            continue
        return User(number, lock)
    raise NoUser(f"no user number between {USERS[0]} and {USERS[-1]} is free (mapped here: those below {mapped})")


@functools.cache
def _taken() -> frozenset[int]:
    """Numbers that have a name or, when this process first asked, a process."""
    named = {entry.pw_uid for entry in pwd.getpwall()}
    running = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                running.add(entry.stat().st_uid)
            except OSError:
                continue  # it has ended
    return frozenset(named | running)


def _mapped() -> int:
    """Numbers from 0 up to this one exist in this user namespace."""
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        return max(int(first) + int(count) for first, _, count in map(str.split, file))
