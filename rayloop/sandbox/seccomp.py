"""Filters of system calls, by the lists of rayloop/sandbox/calls.json.

They need no privilege and no library. A refused call fails with EPERM; one newer than the lists
with ENOSYS: libraries use an older one. Numbers of other machines (x32) end the process.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

from rayloop.sandbox import calls, kernel

Row = tuple[int, int, int, int]
"""code, rows to skip when true, when false, operand"""
_COLUMN = {"x86_64": 0, "aarch64": 1}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_X32, _NEWEST = 0x40000000, 462
_PR_SET_SECCOMP, _FILTER = 22, 2

_SHMGET = 29, 194
_CLONE_THREAD = 0x10000
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_FAMILIES = (1, 2, 10, 16)
"""Of sockets: unix, IPv4, IPv6, netlink."""
_NAME_CALLS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA: what C libraries call
_DESCRIPTOR_COMMANDS = (
    0,
    1,
    2,
    3,
    4,
    1030,
)  # F_DUPFD to F_SETFL; no locks, which others see, nor F_SETOWN, which sends signals
_MEMORY_ADVICE = (0, 4, 8, 10, 11, 14, 15, 16, 17)
"""What allocators say of their own pages. Not how files are read ahead, nor which pages may be shared (KSM) or leave memory:
others could infer it from the time that a page takes.
"""
_WAITS, _PRIVATE = (0, 9, 9 | 256), 128
"""FUTEX_WAIT and WAIT_BITSET, also by the clock: how a thread's end is waited for, as the kernel
signals. Any other futex must be private: pages of a file are shared with other interpreters.
"""
_BARRIERS = (0, 8, 16, 32, 64)  # of this process alone
_SOCKET_QUESTIONS = (
    3,
    4,
    38,
    39,
)  # SO_TYPE, SO_ERROR, SO_PROTOCOL, SO_DOMAIN; not whose process is at the other end
_TERMINAL_QUESTIONS = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX


def refuse_all_but(threads: bool, writing: bool) -> None:
    """Leave this process the listed system calls only.

    ``threads``: it may start some; ``writing``: it has a folder. The filter names the process id of
    the caller. Raises OSError, and KeyError on another machine.
    """
    rows = program(os.getpid(), threads, writing, kernel.MACHINE)
    array = (_Row * len(rows))(*(_Row(*row) for row in rows))
    filtered = _Program(len(rows), array)
    # Without it the kernel lets only an administrator install a filter.
    kernel.no_new_privileges()
    kernel.check(
        kernel.libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(filtered), 0, 0), "seccomp"
    )


def administrators_refused(machine: str = kernel.MACHINE, segments: bool = True) -> bytes:
    """The filter for any program of an ordinary user, as ``bwrap --seccomp`` reads it: no
    namespaces, mounts, tracing or parts of the kernel that only administrators and debuggers need.
    ``segments``: System V's shared memory, which stays when all that used it have ended, and is
    counted nowhere. Raises KeyError on another machine than x86_64 and aarch64.
    """
    return b"".join(struct.pack("HBBI", *row) for row in lenient(machine, segments))


def lenient(machine: str, segments: bool = True) -> list[Row]:
    """The rows of ``administrators_refused``."""
    column, rows = _COLUMN[machine], _of(machine)
    if not segments:
        rows += [(_EQUAL, 0, 1, _SHMGET[column]), (_RETURN, 0, 0, _ERROR | errno.ENOSPC)]
    for numbers in calls.OF_ADMINISTRATORS.values():
        if (number := numbers[column]) is not None:
            rows += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]

    clone, clone3 = (calls.CONDITIONAL[name][column] for name in ("clone", "clone3"))
    socket = calls.SOCKET[column]
    assert clone is not None
    assert clone3 is not None
    assert socket is not None
    families = _one_of(0, _FAMILIES)
    return [
        *rows,
        # A filter cannot read clone3's flags, which lie in memory; C libraries then use clone.
        *((_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)),
        *((_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _low(0)), (_ANY_BIT, 0, 1, _NAMESPACES)),
        *((_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ALLOW)),
        *(
            (_EQUAL, 0, len(families) + 1, socket),
            *families,
            (_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT),
        ),
        *((_AT_LEAST, 0, 1, _NEWEST), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)),
        (_RETURN, 0, 0, _ALLOW),
    ]


def program(pid: int, threads: bool, writing: bool, machine: str) -> list[Row]:
    """The filter's rows, for process ``pid`` of ``machine``."""
    column, rows = _COLUMN[machine], _of(machine)
    for names in (calls.ALWAYS, calls.WRITING if writing else {}):
        for number in sorted(
            found for numbers in names.values() if (found := numbers[column]) is not None
        ):
            rows += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name, tests, otherwise in _conditions(pid, threads):
        which = calls.CONDITIONAL[name][column]
        assert which is not None
        rows += [(_EQUAL, 0, len(tests) + 1, which), *tests, (_RETURN, 0, 0, _ERROR | otherwise)]
    return [
        *rows,
        (_AT_LEAST, 0, 1, _NEWEST),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
    ]


def _of(machine: str) -> list[Row]:
    """What every filter begins with: calls by numbers of another machine end the process; the
    number is loaded.
    """
    rows = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        rows += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    return rows


def _conditions(pid: int, threads: bool) -> Iterable[tuple[str, list[Row], int]]:
    """Name of a call, rows that allow what it may be used for, the error otherwise."""
    thread = [
        (_LOAD, 0, 0, _low(0)),
        (_ANY_BIT, 2, 0, _NAMESPACES),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
    ]
    yield "clone", thread if threads else [], errno.EAGAIN
    yield (
        "futex",
        [
            (_LOAD, 0, 0, _low(1)),
            (_ANY_BIT, 0, 1, _PRIVATE),
            (_RETURN, 0, 0, _ALLOW),
            *_one_of(1, _WAITS),
        ],
        errno.EPERM,
    )
    yield "madvise", _one_of(2, _MEMORY_ADVICE), errno.EINVAL
    yield "membarrier", _one_of(0, _BARRIERS), errno.EINVAL
    yield (
        "clone3",
        [],
        errno.ENOSYS,
    )  # its flags cannot be looked at; C libraries fall back to clone
    yield "tgkill", _one_of(0, (pid,)), errno.EPERM  # abort() of this process
    yield "kill", _one_of(0, (pid,)), errno.EPERM
    yield "prctl", _one_of(0, _NAME_CALLS), errno.EPERM
    yield "prlimit64", _null(2), errno.EPERM  # asking only
    yield "ioctl", _one_of(1, _TERMINAL_QUESTIONS), errno.EPERM
    yield "getsockopt", _one_of(2, _SOCKET_QUESTIONS), errno.EPERM
    for name in ("getpgid", "getsid", "sched_getaffinity"):
        yield name, _one_of(0, (0, pid)), errno.ESRCH
    yield "fcntl", _one_of(1, _DESCRIPTOR_COMMANDS), errno.EPERM
    stream = [(_LOAD, 0, 0, _low(1)), (_AND, 0, 0, 0xF), (_EQUAL, 0, 1, 1), (_RETURN, 0, 0, _ALLOW)]
    yield (
        "socketpair",
        [(_LOAD, 0, 0, _low(0)), (_EQUAL, 0, len(stream), 1), *stream],
        errno.EPERM,
    )  # unix streams: no named peer
    yield "sendto", _null(4), errno.EPERM  # what send() is; to no address


def _one_of(argument: int, values: Iterable[int]) -> list[Row]:
    """Allow the call when the lower half of ``argument``, which is an int in C, is one of
    ``values``.
    """
    rows = [(_LOAD, 0, 0, _low(argument))]
    for value in values:
        rows += [(_EQUAL, 0, 1, value & 0xFFFFFFFF), (_RETURN, 0, 0, _ALLOW)]
    return rows


def _null(argument: int) -> list[Row]:
    """Allow the call when the pointer ``argument`` is NULL."""
    low, high = _low(argument), _low(argument) + 4
    return [
        (_LOAD, 0, 0, low),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, high),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _low(argument: int) -> int:
    """Where the lower half of a call's argument lies in what a filter sees (struct seccomp_data,
    little endian).
    """
    return 16 + 8 * argument


class _Row(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("true", ctypes.c_ubyte),
        ("false", ctypes.c_ubyte),
        ("operand", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rows", ctypes.POINTER(_Row))]
