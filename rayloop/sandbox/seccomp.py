"""Filters of system calls, from the lists of rayloop/sandbox/calls.json.

They need no privilege and no library. A refused call fails with EPERM; one newer than the lists
with ENOSYS: libraries use an older one. Numbers of other machines (x32) end the process.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Mapping

from rayloop.sandbox import calls, kernel

Row = tuple[int, int, int, int]
"""Code, rows to skip when true, rows to skip when false, operand."""
_COLUMN = {"x86_64": 0, "aarch64": 1}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD = 0x20
_EQUAL = 0x15
_ANY_BIT = 0x45
_AT_LEAST = 0x35
_AND = 0x54
_RETURN = 0x06
_ALLOW: Row = (_RETURN, 0, 0, 0x7FFF0000)
_KILL: Row = (_RETURN, 0, 0, 0x80000000)
_ERROR = 0x00050000
_FIRST_X32_CALL = 0x40000000
_FIRST_UNLISTED_CALL = 462
"""The number of the first system call that is newer than the lists."""
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

_SHMGET = (29, 194)
_CLONE_THREAD = 0x10000
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_SOCKET_FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6 and netlink."""
_NAME_OPTIONS = (15, 16, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME and PR_SET_VMA, which C libraries use."""
_DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""F_DUPFD to F_SETFL, and F_DUPFD_CLOEXEC.

Not the locks, which other processes see, nor F_SETOWN, which sends signals.
"""
_MEMORY_ADVICE = (0, 4, 8, 10, 11, 14, 15, 16, 17)
"""The advice that allocators give about their own pages.

Not how files are read ahead, nor which pages may be shared (KSM) or leave memory: others could
infer it from the time that a page takes.
"""
_FUTEX_WAITS = (0, 9, 9 | 256)
"""FUTEX_WAIT and WAIT_BITSET, also by the clock: the C library waits so for the end of a thread.

Any other futex must be private: pages of a file are shared with other interpreters.
"""
_FUTEX_PRIVATE = 128
_MEMORY_BARRIERS = (0, 8, 16, 32, 64)
"""The barriers of this process alone."""
_SOCKET_OPTIONS = (3, 4, 38, 39)
"""SO_TYPE, SO_ERROR, SO_PROTOCOL and SO_DOMAIN; not the process at the other end."""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX."""
_UNIX = 1
_STREAM = 1


def refuse_all_but(threads: bool, writing: bool) -> None:
    """Leave this process the listed system calls only.

    ``threads``: it may start some; ``writing``: it has a folder. The filter names the process id of
    the caller. Raises OSError, and KeyError on another machine.
    """
    rows = program(os.getpid(), threads, writing, kernel.MACHINE)
    array = (_Row * len(rows))(*(_Row(*row) for row in rows))
    filter_program = _Program(len(rows), array)
    # Without it the kernel lets only an administrator install a filter.
    kernel.no_new_privileges()
    result = kernel.libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0
    )
    kernel.check(result, "seccomp")


def administrators_refused(machine: str = kernel.MACHINE, segments: bool = True) -> bytes:
    """The filter for any program of an ordinary user, as ``bwrap --seccomp`` reads it.

    It refuses namespaces, mounts, tracing and the parts of the kernel that only administrators and
    debuggers need. ``segments``: whether System V's shared memory is allowed, which stays when all
    processes that used it have ended, and is counted nowhere. Raises KeyError on a machine other
    than x86_64 and aarch64.
    """
    return b"".join(struct.pack("HBBI", *row) for row in lenient(machine, segments))


def lenient(machine: str, segments: bool = True) -> list[Row]:
    """The rows of ``administrators_refused``."""
    column = _COLUMN[machine]
    rows = _first_rows(machine)
    if not segments:
        rows += _if_equal(_SHMGET[column], [_refuse(errno.ENOSPC)])
    for numbers in calls.OF_ADMINISTRATORS.values():
        number = numbers[column]
        if number is not None:
            rows += _if_equal(number, [_refuse(errno.EPERM)])

    clone = calls.CONDITIONAL["clone"][column]
    clone3 = calls.CONDITIONAL["clone3"][column]
    socket = calls.SOCKET[column]
    assert clone is not None
    assert clone3 is not None
    assert socket is not None
    # A filter cannot read clone3's flags, which are in memory; C libraries then use clone.
    rows += _if_equal(clone3, [_refuse(errno.ENOSYS)])
    without_namespaces = [
        (_LOAD, 0, 0, _low(0)),
        (_ANY_BIT, 0, 1, _NAMESPACES),
        _refuse(errno.EPERM),
        _ALLOW,
    ]
    rows += _if_equal(clone, without_namespaces)
    rows += _if_equal(socket, [*_one_of(0, _SOCKET_FAMILIES), _refuse(errno.EAFNOSUPPORT)])
    rows += _refuse_unlisted()
    rows.append(_ALLOW)
    return rows


def program(pid: int, threads: bool, writing: bool, machine: str) -> list[Row]:
    """The filter's rows, for process ``pid`` of ``machine``."""
    column = _COLUMN[machine]
    rows = _first_rows(machine)
    for table in (calls.ALWAYS, calls.WRITING if writing else {}):
        for number in sorted(_numbers(table, column)):
            rows += _if_equal(number, [_ALLOW])
    for name, tests, error in _conditions(pid, threads):
        conditional = calls.CONDITIONAL[name][column]
        assert conditional is not None
        rows += _if_equal(conditional, [*tests, _refuse(error)])
    rows += _refuse_unlisted()
    rows.append(_refuse(errno.EPERM))
    return rows


def _numbers(table: Mapping[str, calls.Number], column: int) -> list[int]:
    """The numbers of the calls that a machine has."""
    numbers = [row[column] for row in table.values()]
    return [number for number in numbers if number is not None]


def _first_rows(machine: str) -> list[Row]:
    """The rows that every filter begins with.

    Calls by numbers of another machine end the process; then the number of the call is loaded.
    """
    rows = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        _KILL,
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        rows += [(_AT_LEAST, 0, 1, _FIRST_X32_CALL), _KILL]
    return rows


def _refuse_unlisted() -> list[Row]:
    """Refuse calls that are newer than the lists as unknown: libraries then use an older one."""
    return [(_AT_LEAST, 0, 1, _FIRST_UNLISTED_CALL), _refuse(errno.ENOSYS)]


def _refuse(error: int) -> Row:
    """Let the call fail with this error."""
    return (_RETURN, 0, 0, _ERROR | error)


def _if_equal(value: int, rows: list[Row]) -> list[Row]:
    """Run ``rows`` when the loaded value is ``value``, else skip them."""
    return [(_EQUAL, 0, len(rows), value), *rows]


def _conditions(pid: int, threads: bool) -> Iterable[tuple[str, list[Row], int]]:
    """The calls that are allowed by their arguments.

    Yields a call's name, the rows that allow it, and the error of every other use.
    """
    yield "clone", _thread() if threads else [], errno.EAGAIN
    yield "futex", _wait_or_private(), errno.EPERM
    yield "madvise", _one_of(2, _MEMORY_ADVICE), errno.EINVAL
    yield "membarrier", _one_of(0, _MEMORY_BARRIERS), errno.EINVAL
    # A filter cannot read its flags, which are in memory; C libraries then use clone.
    yield "clone3", [], errno.ENOSYS
    # abort() of this process.
    yield "tgkill", _one_of(0, (pid,)), errno.EPERM
    yield "kill", _one_of(0, (pid,)), errno.EPERM
    yield "prctl", _one_of(0, _NAME_OPTIONS), errno.EPERM
    # Reading a limit, not setting one.
    yield "prlimit64", _null(2), errno.EPERM
    yield "ioctl", _one_of(1, _IOCTLS), errno.EPERM
    yield "getsockopt", _one_of(2, _SOCKET_OPTIONS), errno.EPERM
    for name in ("getpgid", "getsid", "sched_getaffinity"):
        yield name, _one_of(0, (0, pid)), errno.ESRCH
    yield "fcntl", _one_of(1, _DESCRIPTOR_COMMANDS), errno.EPERM
    yield "socketpair", _unix_stream(), errno.EPERM
    # send() is sendto without an address.
    yield "sendto", _null(4), errno.EPERM


def _thread() -> list[Row]:
    """Allow a clone that makes a thread and no namespace."""
    return [
        (_LOAD, 0, 0, _low(0)),
        (_ANY_BIT, 2, 0, _NAMESPACES),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        _ALLOW,
    ]


def _wait_or_private() -> list[Row]:
    """Allow a futex call that waits, or whose futex is private."""
    private = [(_LOAD, 0, 0, _low(1)), (_ANY_BIT, 0, 1, _FUTEX_PRIVATE), _ALLOW]
    return [*private, *_one_of(1, _FUTEX_WAITS)]


def _unix_stream() -> list[Row]:
    """Allow a pair of unix stream sockets, which have no named peer."""
    # The upper bits of a socket's type are flags.
    stream = [(_LOAD, 0, 0, _low(1)), (_AND, 0, 0, 0xF), *_if_equal(_STREAM, [_ALLOW])]
    return [(_LOAD, 0, 0, _low(0)), *_if_equal(_UNIX, stream)]


def _one_of(argument: int, values: Iterable[int]) -> list[Row]:
    """Allow the call when an argument is one of ``values``.

    The lower half of the argument is compared, as C passes an int.
    """
    rows: list[Row] = [(_LOAD, 0, 0, _low(argument))]
    for value in values:
        rows += _if_equal(value & 0xFFFFFFFF, [_ALLOW])
    return rows


def _null(argument: int) -> list[Row]:
    """Allow the call when the pointer ``argument`` is NULL."""
    low_half = (_LOAD, 0, 0, _low(argument))
    high_half = (_LOAD, 0, 0, _low(argument) + 4)
    return [low_half, *_if_equal(0, [high_half, *_if_equal(0, [_ALLOW])])]


def _low(argument: int) -> int:
    """The offset of the lower half of a call's argument in struct seccomp_data (little endian)."""
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
