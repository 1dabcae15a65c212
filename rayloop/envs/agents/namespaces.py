"""Start processes in Linux namespaces, and bind their lives to their parents.

Standard library only: ``host.py`` loads this file in the agent's Python, which has no rayloop.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

# Numbers of the kernel, for which Python has no names.
NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000
"""CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNS and CLONE_NEWIPC.

They are the namespaces of users, process ids, mounts and IPC.
"""
NO_NETWORK = 0x40000000
"""CLONE_NEWNET: a network namespace, which has only a loopback device."""
SET_INTERFACE_FLAGS = 0x8914
"""SIOCSIFFLAGS."""
INTERFACE_UP = 1
"""IFF_UP."""
RECURSIVE_PRIVATE = 0x4000 | 0x40000
"""MS_REC and MS_PRIVATE: mounts are not seen outside of the namespace."""
PLAIN_MOUNT = 2 | 4 | 8
"""MS_NOSUID, MS_NODEV and MS_NOEXEC."""
PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, an option of prctl."""

LIBC = ctypes.CDLL(None, use_errno=True)


def start(work: Callable[[], None], namespaces: int) -> int:
    """Start a process that does ``work`` and is killed with this one; returns its id.

    With ``namespaces``, a child of it does the work. That child is the first process in them, and
    all other processes there end with it.
    """
    parent = os.getpid()
    # Only a process outside of a user namespace may map its users. The child therefore asks for the
    # mapping once it is in the new namespace, and waits.
    ask_reader, ask_writer = os.pipe()
    mapped_reader, mapped_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            if namespaces:
                check(LIBC.unshare(namespaces))
                os.write(ask_writer, b"1")
                os.read(mapped_reader, 1)
            die_with(parent)
            if namespaces:
                _enter_process_namespace()
            for descriptor in (ask_reader, ask_writer, mapped_reader, mapped_writer):
                os.close(descriptor)
            work()
        os._exit(1)
    os.close(ask_writer)
    if namespaces and os.read(ask_reader, 1):
        _map_users(pid)
        os.write(mapped_writer, b"1")
    for descriptor in (ask_reader, mapped_reader, mapped_writer):
        os.close(descriptor)
    return pid


def _enter_process_namespace() -> None:
    """Return only in the first process of the new namespace of process ids."""
    # A process stays in its namespace of process ids: its first child is the first in the new one.
    child = os.fork()
    if child:
        os._exit(bool(os.waitpid(child, 0)[1]))
    die_with(0)
    # OSError, where a container hides parts of its /proc.
    check(LIBC.mount(b"none", b"/", None, RECURSIVE_PRIVATE, None))
    check(LIBC.mount(b"proc", b"/proc", b"proc", PLAIN_MOUNT, None))


def _map_users(pid: int) -> None:
    """Map users and groups into the new user namespace of a process.

    Root maps all that it has, other users map themselves.
    """
    is_root = os.geteuid() == 0
    for kind, id_here in (("uid", os.geteuid()), ("gid", os.getegid())):
        ranges = [f"{id_here} {id_here} 1"]
        if is_root:
            with open(f"/proc/self/{kind}_map", encoding="utf-8") as file:
                ranges = [f"{inside} {inside} {count}" for inside, _, count in map(str.split, file)]
        elif kind == "gid":
            write(f"/proc/{pid}/setgroups", "deny")
        write(f"/proc/{pid}/{kind}_map", "\n".join(ranges))


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends.

    ``parent`` is the parent's id in this process's namespace, 0 for a parent outside.
    """
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def listen(port: int, backlog: int) -> socket.socket:
    """Listen on loopback in a new network namespace, whose loopback device is still down."""
    with socket.socket() as any_socket:
        flags = struct.pack("16sh22x", b"lo", INTERFACE_UP)
        fcntl.ioctl(any_socket, SET_INTERFACE_FLAGS, flags)
    return socket.create_server(("127.0.0.1", port), backlog=backlog)


def check(result: int) -> None:
    """Raise OSError for a system call's negative result."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write(path: str, text: str) -> None:
    """Write a file of /proc, /sys or a cgroup."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
