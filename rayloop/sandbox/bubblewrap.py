"""A bubblewrap command line (a program with the system's folders read-only, no network, sized
folders to write to), and the users of such programs: numbers without a name, one for each program
that root starts.
"""

import functools
import itertools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from rayloop.sandbox.memory import ENDING, lives

USERS = range(61184, 65520)
"""What systemd keeps for users without a name; below 65,536, so that a rootless container has them
too.
"""
# Processes begin at different numbers, so that few of them try the same one first.
_next = itertools.count(os.getpid() * 61)
_kept: list["User"] = []
"""Users that stay claimed until this process ends: a socket that nothing refers to is closed, and
its name is free.
"""
LOOK = 0.005
"""Seconds between two looks at the processes of a user."""


class NoUser(OSError):
    """There is no free user number, or this process may not become another user."""


class User:
    """A user number, for this process alone until ``close`` or its end."""

    def __init__(self, number: int, lock: socket.socket) -> None:
        self.number, self._lock = number, lock

    def close(self) -> None:
        """Give the number back.

        The caller knows that no process of this user lives, or will start.
        """
        self._lock.close()

    def close_when_unused(self, seconds: float = ENDING) -> None:
        """Give the number back after its processes have ended.

        If one of them still lives ``seconds`` later, the number is kept.
        """
        until = time.monotonic() + seconds
        while _in_use(self.number):
            if time.monotonic() > until:
                self.keep()
                return
            time.sleep(LOOK)
        self.close()

    def keep(self) -> None:
        """Claim the number until this process ends: the next program with it would share the user
        with a process that lives.
        """
        _kept.append(self)


@contextmanager
def borrowed() -> Iterator[int | None]:
    """A number for a program that root starts, as long as it is needed; None for another user.

    Raises NoUser.
    """
    if os.geteuid() != 0:
        yield None
        return
    user = free_user()
    try:
        yield user.number
    finally:
        # The program was waited for, but what it has started may still be ending.
        user.close_when_unused()


def free_user() -> User:
    """A number without a name, a process or another claim.

    Raises NoUser. Only root has use for it. The claim is the name of an abstract socket: the kernel
    frees it when the process ends, however that ends.
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
            # The name is bound: another process has claimed this user.
            lock.close()
            continue
        return User(number, lock)
    raise NoUser(
        f"no user number between {USERS[0]} and {USERS[-1]} is free (mapped here: those below"
        f" {mapped})"
    )


@functools.cache
def _taken() -> frozenset[int]:
    """Numbers that have a name or, when this process first asked, a process."""
    import pwd  # Windows has none, where this module is imported too

    named = {entry.pw_uid for entry in pwd.getpwall()}
    running = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                running.add(entry.stat().st_uid)
            except OSError:
                continue  # it has ended
    return frozenset(named | running)


def _in_use(number: int) -> bool:
    """Whether a process of this user lives."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            # A process may end between the listing and the look at it.
            with suppress(OSError):
                if entry.stat().st_uid == number and lives(int(entry.name)):
                    return True
    return False


def _mapped() -> int:
    """Numbers from 0 up to this one exist in this user namespace."""
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        return max(int(first) + int(count) for first, _, count in map(str.split, file))


MIB = 1 << 20
SYSTEM = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/fonts", "/etc/localtime")
"""What programs of /usr look at elsewhere; none of it is about this machine's users."""
OF_USR = tuple(
    f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share")
)
"""Not /usr/local/etc or /usr/src, where machines and images keep keys and data."""
_OF_PYTHON = ("bin", "lib", "lib64", "share", "pyvenv.cfg")
Proc = Literal["fresh", "host", "none"]
"""host: this machine's, where a container forbids a fresh one; the caller must cover it before code
can look.
"""


def command(
    program: Sequence[str],
    *,
    read: Iterable[str] = (),
    write: Mapping[str, str] | None = None,
    folders: Mapping[str, int] | None = None,
    environment: Mapping[str, str] | None = None,
    uid: int | None = None,
    proc: Proc = "fresh",
    options: Sequence[str] = (),
    beside: tuple[Sequence[str], int | None] | None = None,
) -> list[str]:
    """The command line that runs ``program`` in namespaces of its own (user, process ids, mounts,
    IPC, host name, network: none). It ends with the thread that starts it. It sees ``OF_USR`` and
    ``SYSTEM``; the paths of ``read``, read-only; those of ``write`` (here -> inside), which ``uid``
    must be able to write; and ``folders``, empty ones in memory (path -> bytes; /tmp has 64 MiB and
    /dev/shm 16 MiB by default). Its variables are ``environment`` and a PATH; bwrap itself has
    none, since code inside could read them from /proc/1/environ. ``options`` of bwrap come last,
    such as ``--file FD PATH``. ``beside``: a program and its ``uid``, in the same namespaces, as a
    child of ``program``, which finds its process id in the variable BESIDE. ``uid`` (``free_user``)
    is the unprivileged user of a program that root starts; another user must give None. Raises
    ValueError when that is not so, FileNotFoundError without bwrap or a folder of ``read``.
    """
    bwrap, root = _found(uid), os.geteuid() == 0
    unshared = [
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-net",
        "--unshare-cgroup-try",
    ]
    line = [
        "/usr/bin/env",
        "-i",
        bwrap,
        *unshared,
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ]
    line += ["--hostname", "sandbox"]
    if (
        root
    ):  # which needs no user namespace, and whose two privileges end with the change of user below
        line += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        line += ["--unshare-user"]

    # bwrap applies its options in order: a folder must be made before something is bound below it.
    line += ["--perms", "0755", "--dir", "/usr"]
    for path in filter(os.path.isdir, OF_USR):
        line += (
            ["--symlink", os.readlink(path), path]
            if os.path.islink(path)
            else ["--ro-bind", path, path]
        )
    line += _system_links()
    line += {"fresh": ["--proc", "/proc"], "host": ["--bind", "/proc", "/proc"], "none": []}[proc]
    line += ["--dev", "/dev"]
    for path, size in {"/tmp": 64 * MIB, "/dev/shm": 16 * MIB, **(folders or {})}.items():
        line += [*_parents(path), "--size", str(size), "--perms", "1777", "--tmpfs", path]
    for path in sorted({*filter(os.path.exists, SYSTEM), *map(os.path.abspath, read)}):
        if not any(Path(path).is_relative_to(folder) for folder in OF_USR):
            line += [*_parents(path), "--ro-bind", path, path]
    for here, inside in (write or {}).items():
        line += [*_parents(inside), "--bind", here, inside]
    for name, value in {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": "/tmp",
        **(environment or {}),
    }.items():
        line += ["--setenv", name, value]

    # The root becomes read-only last: every mount above needs a folder that is made in it.
    line += ["--chdir", "/tmp", *options, "--remount-ro", "/"]
    if beside is None:
        return [*line, *_as_user(uid), *program]
    _found(beside[1])
    # ``exec`` keeps the shell's process id, so the first program is a child of ``program`` itself.
    first, then = (
        shlex.join([*_as_user(beside[1]), *beside[0]]),
        shlex.join([*_as_user(uid), *program]),
    )
    return [*line, "/bin/sh", "-c", f"{first} & export BESIDE=$!; exec {then}"]


def _as_user(uid: int | None) -> list[str]:
    """What makes root's program another user's, for good; nothing for the program of another user."""
    if uid is None:
        return []
    return [
        "/usr/bin/setpriv",
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "--inh-caps=-all",
        "--",
    ]


def _found(uid: int | None) -> str:
    """The path of bwrap. Raises ValueError for a user who cannot be, FileNotFoundError."""
    if (os.geteuid() == 0) != (uid is not None) or uid == 0:
        raise ValueError(
            f"uid must be a number other than 0 for root, and None for others, not {uid}"
        )
    if (bwrap := shutil.which("bwrap")) is None:
        raise FileNotFoundError("bwrap is not installed: apt-get install bubblewrap")
    return bwrap


def python_folders(*prefixes: str) -> list[str]:
    """What ``read`` must have for this Python to run inside: of ``prefixes``, or of all that it
    has, its packages too.
    """
    found = {os.path.abspath(path) for path in prefixes or (sys.prefix, sys.base_prefix)}
    return sorted(
        path
        for prefix in found
        for name in _OF_PYTHON
        if os.path.exists(path := f"{prefix}/{name}")
    )


@functools.cache
def refused(uid: int | None = None, proc: Proc = "fresh") -> str:
    """Why ``command`` does not work here, in bwrap's words; empty when it does (tried once per
    process, some 10 ms).
    """
    try:
        line = command(["/usr/bin/true"], uid=uid, proc=proc)
        ended = subprocess.run(line, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode == 0:
        return ""
    return ended.stderr.strip() or f"bwrap ended with {ended.returncode}"


def refused_here() -> str:
    """Why ``command`` does not work for programs that this user starts; empty when it does."""
    try:
        with borrowed() as number:
            return refused(number)
    except NoUser as error:
        return str(error)


def _system_links() -> Iterator[str]:
    """/lib and the like, which are links into /usr on most systems and folders on others."""
    for name in ("/lib", "/lib64", "/bin", "/sbin"):
        if os.path.islink(name):
            yield from ("--symlink", os.readlink(name), name)
        elif os.path.isdir(name):
            yield from ("--ro-bind", name, name)


def _parents(path: str) -> Iterator[str]:
    """The folders above ``path``, readable by all: bwrap 0.8 would make them for root alone."""
    for folder in [str(folder) for folder in reversed(Path(path).parents)][1:]:
        if folder not in ("/usr", "/tmp", "/dev"):
            yield from ("--perms", "0755", "--dir", folder)
