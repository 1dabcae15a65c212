"""The filter's program, run here row by row, for both machines."""

import errno
import struct

import pytest

from rayloop.sandbox import calls, seccomp

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(
    machine: str,
    number: int,
    *arguments: int,
    pid: int = 7,
    threads: bool = True,
    writing: bool = True,
) -> int:
    """What the kernel would make of a call."""
    return run(
        seccomp.program(pid, threads, writing, machine), number, ARCHITECTURES[machine], *arguments
    )


def run(rows: list[seccomp.Row], number: int, architecture: int, *arguments: int) -> int:
    data = struct.pack(
        "<IIQ6Q", number, architecture, 0, *(arguments + (0,) * (6 - len(arguments)))
    )
    at = value = 0
    while True:
        code, true, false, operand = rows[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[
                code
            ]
            at += true if holds else false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_only_what_is_listed_passes(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    listed = {
        numbers[column] for table in (calls.ALWAYS, calls.WRITING) for numbers in table.values()
    }
    conditional = {numbers[column] for numbers in calls.CONDITIONAL.values()}
    for number in set(range(600)) - conditional:
        expected = (
            ALLOW if number in listed else ERROR | (errno.ENOSYS if number >= 462 else errno.EPERM)
        )
        assert verdict(machine, number) == expected, number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments_decide_about_the_others(machine: str) -> None:
    def call(name: str, *arguments: int, **how: bool) -> bool:
        number = calls.CONDITIONAL[name][list(ARCHITECTURES).index(machine)]
        assert number is not None
        return verdict(machine, number, *arguments, **how) == ALLOW

    assert call("clone", 0x3D0F00)  # a thread
    assert not call("clone", 0x3D0F00, threads=False)
    assert not call("clone", 0x01200011)  # a process
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert not call("clone", namespace)
        assert not call("clone", 0x3D0F00 | namespace), "nor one for a thread"
    assert not call("clone3")
    for private in (0 | 128, 1 | 128, 3 | 128, 9 | 256 | 128):
        assert call("futex", 0, private)
    assert call("futex", 0, 0), "the end of a thread"
    assert call("futex", 0, 9 | 256)
    for shared in (1, 3, 4, 5, 7, 10, 12, 1 | 256):
        assert not call("futex", 0, shared), "a page of a file is another's too"
    assert call("madvise", 0, 4096, 4)
    assert call("madvise", 0, 4096, 14)
    for advice in (1, 2, 3, 9, 12, 20, 21, 25, 100):
        assert not call("madvise", 0, 4096, advice)
    assert call("membarrier", 8)
    assert not call("membarrier", 1), "a barrier of all processes"
    assert call("kill", 7, 9)
    assert not call("kill", 0xFFFFFFFF, 9)
    assert not call("tgkill", 1, 1, 9)
    assert call("prctl", 15)
    assert not call("prctl", 1)
    assert call("prlimit64", 0, 7, 0, 0x7FFF00000000)
    assert not call("prlimit64", 0, 7, 0x7FFF00000000)
    assert not call("prlimit64", 0, 7, 0x100000000)
    assert call("ioctl", 1, 0x5401)
    assert not call("ioctl", 1, 0x5412)  # puts keys into a terminal
    assert call("fcntl", 3, 1030)
    assert not call("fcntl", 3, 8, 1)  # F_SETOWN
    assert call("socketpair", 1, 1 | 0o2000000)
    assert not call("socketpair", 1, 2)
    assert not call("socketpair", 2, 1)
    assert call("sendto", 3, 1, 1, 0, 0)
    assert not call("sendto", 3, 1, 1, 0, 0x7FFF00000000)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_programs_of_a_desktop_have_all_calls_but_those_of_administrators(machine: str) -> None:
    column, rows = list(ARCHITECTURES).index(machine), seccomp.lenient(machine)
    refused = {numbers[column] for numbers in calls.OF_ADMINISTRATORS.values()} - {None}
    clone, clone3 = (calls.CONDITIONAL[name][column] or 0 for name in ("clone", "clone3"))
    socket = calls.SOCKET[column] or 0

    def said(number: int, *arguments: int) -> int:
        return run(rows, number, ARCHITECTURES[machine], *arguments)

    for number in set(range(600)) - {clone, clone3, socket}:
        expected = (
            ERROR | errno.EPERM
            if number in refused
            else ERROR | errno.ENOSYS
            if number >= 462
            else ALLOW
        )
        assert said(number) == expected, number
    assert said(clone, 0x01200011) == said(clone, 0x3D0F00) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert said(clone, flag | 17) == ERROR | errno.EPERM
    assert said(clone3) == ERROR | errno.ENOSYS
    assert said(socket, 1, 1) == said(socket, 10, 1) == ALLOW
    assert said(socket, 38, 5) == said(socket, 40, 1) == ERROR | errno.EAFNOSUPPORT
    assert run(rows, 0, 0x40000003) == KILL
    assert len(seccomp.administrators_refused(machine)) == 8 * len(rows)


def test_without_a_folder_nothing_is_renamed_or_removed() -> None:
    assert verdict("x86_64", calls.WRITING["unlink"][0] or 0) == ALLOW
    assert verdict("x86_64", calls.WRITING["unlink"][0] or 0, writing=False) == ERROR | errno.EPERM


def test_numbers_of_other_machines_end_the_process() -> None:
    assert verdict("x86_64", 0x40000000) == KILL
    assert (
        run(seccomp.program(7, True, True, "x86_64"), 11, 0x40000003) == KILL
    )  # 32 bit: munmap is 11 elsewhere
