"""Inside the sandbox: a new interpreter confines itself, in this order, before it runs any code."""

import os
import resource
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

from rayloop.sandbox import kernel, seccomp
from rayloop.sandbox.options import Level

CONNECTION = 3
"""The only descriptor that is left beside 0 to 2, which are /dev/null."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_EMPTY = "size=4k,nr_inodes=2,mode=555"
_FILES, _INSIDE_USER = 64, 1000


def confine(
    settings: dict[str, Any], connection: socket.socket, folder: str, user: int | None
) -> socket.socket:
    """Confine this process at ``settings["level"]``, as ``user`` when it is root's; its files go
    into a new ``folder``. Returns the connection under its new number. Raises OSError with what the
    kernel refused; the process must end then.
    """
    level, server = Level(settings["level"]), os.getppid()
    kernel.die_with_parent(None)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()

    # The fork server's control socket must not reach the code.
    connection = _only(connection)
    if level == Level.NAMESPACES:
        folder = _nothing_of_this_machine(settings["scratch"], settings["read"])
    elif level == Level.PROCESS:
        os.mkdir(folder, 0o700)
        if user is not None:
            os.chown(folder, user, user)

    # Before the change of user, after which this process's files in /proc belong to root.
    kernel.first_to_go()
    if user is not None:
        hidden = level == Level.FILTERED and not all(
            f.stat().st_mode & 1 for path in settings["read"] for f in Path(path).parents
        )
        kernel.become(
            user, keep_read=hidden
        )  # a Python below /root: Landlock still leaves it that alone
    kernel.die_with_parent(
        None if level == Level.NAMESPACES else server
    )  # which a change of user forgets
    writing = level != Level.FILTERED
    os.chdir(folder if writing else "/")
    os.umask(0o077)
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = folder

    # The kernel counts threads by user and user namespace: before both are final the limit would
    # count those of the run.
    _limit(settings, alone=level == Level.NAMESPACES or user is not None)

    # Last, since the filter also refuses the calls of Landlock and of the limits above.
    if level != Level.PROCESS:
        if kernel.landlock_version() or level == Level.FILTERED:
            kernel.restrict([*settings["read"], *_DEVICES], [folder] if writing else [])
        seccomp.refuse_all_but(
            threads=level == Level.NAMESPACES and settings["threads"] > 0, writing=writing
        )
    return connection


def _only(connection: socket.socket) -> socket.socket:
    """Close every descriptor but ``connection``."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if connection.fileno() != CONNECTION:
        os.dup2(connection.fileno(), CONNECTION)
        connection.detach()
        connection = socket.socket(fileno=CONNECTION)
    # A forked process has every descriptor of its parent; close-on-exec helps only a new program.
    os.closerange(CONNECTION + 1, 1 << 16)
    return connection


def _nothing_of_this_machine(scratch: int, read: list[str]) -> str:
    """New namespaces, a /tmp of ``scratch`` bytes (with ``read`` below it), no /proc, /dev/shm,
    capabilities. Returns /tmp.
    """
    kernel.enter_user_namespace(
        _INSIDE_USER
    )  # so that the limit of threads counts this interpreter alone
    kernel.unshare(kernel.NEW_MOUNTS, kernel.NEW_IPC)
    kernel.first_to_go()  # while there is a /proc

    # A shared mount would show the mounts below to the fork server too.
    kernel.mount("none", "/", kernel.RECURSIVE | kernel.PRIVATE)
    plain = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_PROGRAMS

    # The new /tmp hides a Python that is installed below it; a descriptor still reaches its files.
    kept = {
        path: os.open(path, os.O_PATH)
        for path in read
        if path.startswith("/tmp/") and os.path.exists(path)
    }
    kernel.mount("tmpfs", "/tmp", plain, f"size={scratch},nr_inodes=512,mode=700")
    for path, opened in kept.items():
        folder = path if os.path.isdir(f"/proc/self/fd/{opened}") else os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        if folder != path:
            # A file can be bound only over a file.
            os.close(os.open(path, os.O_CREAT))
        kernel.mount(f"/proc/self/fd/{opened}", path, kernel.BIND)
        os.close(opened)

    # bwrap masks parts of /proc, and then the kernel allows no fresh one: an empty folder hides it.
    for place in ("/dev/shm", "/proc"):
        kernel.mount("tmpfs", place, plain | kernel.READ_ONLY, _EMPTY)
    kernel.drop_capabilities()
    return "/tmp"


def _limit(settings: dict[str, Any], alone: bool) -> None:
    """``alone``: no other process has this user number, so that its threads can be counted."""
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_FSIZE: settings["scratch"],
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: settings["cpu_seconds"],
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if alone:
        limits[resource.RLIMIT_NPROC] = max(settings["threads"], 1)
    for which, value in limits.items():
        # Code could raise a soft limit again, so the hard one is set as well.
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the file size is an error
