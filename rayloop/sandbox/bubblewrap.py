"""A bubblewrap command line, and the users of the programs that it runs.

The program sees the system's folders read-only, has no network, and writes to folders of a set
size. A user is a number without a name; each program that root starts gets a different one.
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

from rayloop.sandbox.memory import EXIT_TIMEOUT_S, lives

USERS = range(61184, 65520)
"""The numbers that systemd reserves for users without a name.

They are below 65,536, so that a rootless container has them too.
"""
# Processes begin at different numbers, so that few of them try the same one first.
_user_index = itertools.count(os.getpid() * 61)
_claimed_until_exit: list["User"] = []
"""Users that stay claimed until this process ends.

Without this reference Python would close the socket of a user, and so free its name.
"""
_POLL_INTERVAL_S = 0.005
"""Seconds between two looks at the processes of a user."""


class NoUser(OSError):
    """No user number is free, or this process may not become another user."""


class User:
    """A user number, for this process alone until ``close`` or its end."""

    def __init__(self, number: int, lock: socket.socket) -> None:
        self.number = number
        self._lock = lock

    def close(self) -> None:
        """Give the number back.

        The caller must know that no process of this user lives, or will start.
        """
        self._lock.close()

    def close_when_unused(self, seconds: float = EXIT_TIMEOUT_S) -> None:
        """Give the number back after its processes have ended.

        If one of them still lives ``seconds`` later, the number is kept.
        """
        until = time.monotonic() + seconds
        while _in_use(self.number):
            if time.monotonic() > until:
                self.keep()
                return
            time.sleep(_POLL_INTERVAL_S)
        self.close()

    def keep(self) -> None:
        """Claim the number until this process ends.

        Otherwise the next program with it would share the user with a process that lives.
        """
        _claimed_until_exit.append(self)


@contextmanager
def borrowed() -> Iterator[int | None]:
    """A number for one program that root starts; None where this process is not root's.

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
    users_in_use = _users_in_use()
    mapped = _mapped()
    for _ in USERS:
        number = USERS[next(_user_index) % len(USERS)]
        if number in users_in_use or number >= mapped:
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
def _users_in_use() -> frozenset[int]:
    """Numbers that have a name or that had a process at the first call."""
    # Windows has no ``pwd``, and this module is imported there too.
    import pwd

    user_numbers = {entry.pw_uid for entry in pwd.getpwall()}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            # A process may end between the listing and the look at it.
            with suppress(OSError):
                user_numbers.add(entry.stat().st_uid)
    return frozenset(user_numbers)


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
"""Files that programs of /usr read elsewhere; none of them is about this machine's users."""
OF_USR = tuple(
    f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share")
)
"""Not /usr/local/etc or /usr/src, where machines and images keep keys and data."""
_PYTHON_ENTRIES = ("bin", "lib", "lib64", "share", "pyvenv.cfg")
Proc = Literal["fresh", "host", "none"]
"""Which /proc a program has.

host: the machine's, where a container forbids a fresh one; the caller must cover it before code can
read it.
"""
_ISOLATION = (
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-net",
    "--unshare-cgroup-try",
    "--die-with-parent",
    "--new-session",
    "--clearenv",
    "--hostname",
    "sandbox",
)
_ROOT_CAPABILITIES = (
    "--cap-drop",
    "ALL",
    "--cap-add",
    "CAP_SETUID",
    "--cap-add",
    "CAP_SETGID",
)
_PROC_OPTIONS: Mapping[Proc, Sequence[str]] = {
    "fresh": ("--proc", "/proc"),
    "host": ("--bind", "/proc", "/proc"),
    "none": (),
}
_MEMORY_FOLDERS = {"/tmp": 64 * MIB, "/dev/shm": 16 * MIB}
"""Bytes of the folders in memory that every program has."""
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"}


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
    """The command line that runs ``program`` in new namespaces.

    The namespaces are user, process ids, mounts, IPC, host name and network (without any
    connection). The program ends with the thread that starts it. It sees ``OF_USR`` and ``SYSTEM``;
    the paths of ``read``, read-only; the paths of ``write`` (here -> inside), which ``uid`` must be
    able to write; and ``folders``, empty ones in memory (path -> bytes; /tmp has 64 MiB and
    /dev/shm 16 MiB by default). Its variables are ``environment`` and a PATH; bwrap itself has
    none, since code inside could read them from /proc/1/environ. ``options`` of bwrap come last,
    such as ``--file FD PATH``. ``beside``: a second program and its ``uid``, in the same
    namespaces, as a child of ``program``, which finds its process id in the variable BESIDE.
    ``uid`` (from ``free_user``) is the unprivileged user of a program that root starts; any other
    user must give None. Raises ValueError for another ``uid``, and FileNotFoundError when bwrap or
    a folder of ``read`` is missing.
    """
    bwrap = _bwrap(uid)
    line = ["/usr/bin/env", "-i", bwrap, *_ISOLATION]
    if os.geteuid() == 0:
        # Root needs no user namespace; ``_as_user`` ends these two capabilities.
        line += _ROOT_CAPABILITIES
    else:
        line.append("--unshare-user")

    # bwrap applies its options in order: a folder must be made before something is bound below it.
    line += _system_mounts()
    line += _PROC_OPTIONS[proc]
    line += ["--dev", "/dev"]
    for path, size in {**_MEMORY_FOLDERS, **(folders or {})}.items():
        line += [*_parents(path), "--size", str(size), "--perms", "1777", "--tmpfs", path]
    line += _read_only_mounts(read)
    for path_here, path_inside in (write or {}).items():
        line += [*_parents(path_inside), "--bind", path_here, path_inside]
    for name, value in {**_ENVIRONMENT, **(environment or {})}.items():
        line += ["--setenv", name, value]

    # The root becomes read-only last: every mount above needs a folder that is made in it.
    line += ["--chdir", "/tmp", *options, "--remount-ro", "/"]
    user_program = [*_as_user(uid), *program]
    if beside is None:
        return [*line, *user_program]
    second_program, second_uid = beside
    _bwrap(second_uid)
    background = shlex.join([*_as_user(second_uid), *second_program])
    # ``exec`` keeps the shell's process id, so the second program is a child of ``program`` itself.
    script = f"{background} & export BESIDE=$!; exec {shlex.join(user_program)}"
    return [*line, "/bin/sh", "-c", script]


def _as_user(uid: int | None) -> list[str]:
    """The prefix that changes the user of root's program for good; empty for ``uid`` None."""
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


def _bwrap(uid: int | None) -> str:
    """The path of bwrap. Raises ValueError for an impossible ``uid``, FileNotFoundError."""
    is_root = os.geteuid() == 0
    if is_root != (uid is not None) or uid == 0:
        raise ValueError(
            f"uid must be a number other than 0 for root, and None for others, not {uid}"
        )
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("bwrap is not installed: apt-get install bubblewrap")
    return bwrap


def python_folders(*prefixes: str) -> list[str]:
    """The paths that ``read`` must have for this Python and its packages to run inside.

    They are those below ``prefixes``, by default below all prefixes of this Python.
    """
    folders = {os.path.abspath(path) for path in prefixes or (sys.prefix, sys.base_prefix)}
    paths = [f"{folder}/{name}" for folder in folders for name in _PYTHON_ENTRIES]
    return sorted(filter(os.path.exists, paths))


@functools.cache
def refused(uid: int | None = None, proc: Proc = "fresh") -> str:
    """Why ``command`` does not work here, in bwrap's words; empty when it does.

    It is tried once per process, in some 10 ms.
    """
    try:
        return trial(command(["/usr/bin/true"], uid=uid, proc=proc))
    except OSError as error:
        return str(error)


def trial(line: Sequence[str]) -> str:
    """Why a command fails within ten seconds, in its own words; empty when it does not.

    Raises OSError when it cannot be started.
    """
    try:
        process = subprocess.run(line, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired as error:
        return str(error)
    if process.returncode == 0:
        return ""
    return process.stderr.strip() or f"{line[0]} ended with {process.returncode}"


def refused_here() -> str:
    """Why ``command`` does not work for programs that this user starts; empty when it does."""
    try:
        with borrowed() as number:
            return refused(number)
    except NoUser as error:
        return str(error)


def _system_mounts() -> Iterator[str]:
    """The options for the system's folders, each a link or a folder as it is outside.

    /lib and the like are links into /usr on most systems and folders on others.
    """
    yield from ("--perms", "0755", "--dir", "/usr")
    # ``isdir`` also leaves out links that lead nowhere.
    for path in (*filter(os.path.isdir, OF_USR), "/lib", "/lib64", "/bin", "/sbin"):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)


def _read_only_mounts(paths: Iterable[str]) -> Iterator[str]:
    """The options for ``SYSTEM`` and ``paths``, without paths that are below ``OF_USR``."""
    for path in sorted({*filter(os.path.exists, SYSTEM), *map(os.path.abspath, paths)}):
        if not any(Path(path).is_relative_to(folder) for folder in OF_USR):
            yield from (*_parents(path), "--ro-bind", path, path)


def _parents(path: str) -> Iterator[str]:
    """The options that make the folders above ``path``, readable by all.

    bwrap 0.8 would make them readable for root alone.
    """
    # The last parent of an absolute path is the root.
    for folder in map(str, reversed(Path(path).parents[:-1])):
        if folder not in ("/usr", "/tmp", "/dev"):
            yield from ("--perms", "0755", "--dir", folder)
