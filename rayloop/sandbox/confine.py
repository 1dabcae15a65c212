"""Inside the sandbox: a new interpreter confines itself, in this order, before it runs any code."""

import os
import resource
import signal
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from rayloop.sandbox import kernel, seccomp
from rayloop.sandbox.options import Level

CONNECTION_DESCRIPTOR = 3
"""The only descriptor that stays open besides 0 to 2, which are /dev/null."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_EMPTY_FOLDER = "size=4k,nr_inodes=2,mode=555"
_MOST_DESCRIPTORS = 64
_USER_INSIDE = 1000
"""The number of the user in the new user namespace."""


def confine(
    settings: dict[str, Any], connection: socket.socket, folder: str, user: int | None
) -> socket.socket:
    """Confine this process at ``settings["level"]``, as ``user`` when it is root's.

    Its files go into a new ``folder``. Returns the connection under its new number. Raises OSError
    with what the kernel refused; the process must end then.
    """
    level = Level(settings["level"])
    server = os.getppid()
    kernel.die_with_parent(None)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()

    # The fork server's control socket must not reach the code.
    connection = _close_all_but(connection)
    if level == Level.NAMESPACES:
        folder = _hide_machine(settings["scratch"], settings["read"])
    elif level == Level.PROCESS:
        os.mkdir(folder, 0o700)
        if user is not None:
            os.chown(folder, user, user)

    # Before the change of user, after which this process's files in /proc belong to root.
    kernel.first_to_go()
    if user is not None:
        # A Python below /root needs the privilege; Landlock still allows nothing but that Python.
        keep_read = level == Level.FILTERED and not _all_can_enter(settings["read"])
        kernel.become(user, keep_read=keep_read)
    # Again, since a change of user cancels it.
    kernel.die_with_parent(None if level == Level.NAMESPACES else server)
    writing = level != Level.FILTERED
    os.chdir(folder if writing else "/")
    os.umask(0o077)
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = folder

    # The kernel counts threads by user and user namespace: before both are final the limit would
    # count the threads of the run.
    _limit(settings, alone=level == Level.NAMESPACES or user is not None)

    # Last, since the filter also refuses the calls of Landlock and of the limits above.
    if level != Level.PROCESS:
        if kernel.landlock_version() or level == Level.FILTERED:
            kernel.restrict([*settings["read"], *_DEVICES], [folder] if writing else [])
        threads = level == Level.NAMESPACES and settings["threads"] > 0
        seccomp.refuse_all_but(threads=threads, writing=writing)
    return connection


def _all_can_enter(paths: list[str]) -> bool:
    """Whether every user may enter the folders above these paths."""
    folders = {folder for path in paths for folder in Path(path).parents}
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)


def _close_all_but(connection: socket.socket) -> socket.socket:
    """Close every descriptor but ``connection``, and return that under its new number."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if connection.fileno() != CONNECTION_DESCRIPTOR:
        os.dup2(connection.fileno(), CONNECTION_DESCRIPTOR)
        connection.detach()
        connection = socket.socket(fileno=CONNECTION_DESCRIPTOR)
    # A forked process has every descriptor of its parent; close-on-exec helps only a new program.
    os.closerange(CONNECTION_DESCRIPTOR + 1, 1 << 16)
    return connection


def _hide_machine(scratch: int, read: list[str]) -> str:
    """Enter new namespaces without /proc, /dev/shm and capabilities.

    They have a /tmp of ``scratch`` bytes, with ``read`` below it. Returns /tmp.
    """
    # The user namespace lets the limit of threads count this interpreter alone.
    kernel.enter_user_namespace(_USER_INSIDE)
    kernel.unshare(kernel.NEW_MOUNTS, kernel.NEW_IPC)
    # Before /proc is hidden.
    kernel.first_to_go()

    # A shared mount would show the mounts below to the fork server too.
    kernel.mount("none", "/", kernel.RECURSIVE | kernel.PRIVATE)
    data_only = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_PROGRAMS

    # The new /tmp hides a Python that is installed below it; a descriptor still reaches its files.
    hidden = [path for path in read if path.startswith("/tmp/") and os.path.exists(path)]
    descriptors = {path: os.open(path, os.O_PATH) for path in hidden}
    kernel.mount("tmpfs", "/tmp", data_only, f"size={scratch},nr_inodes=512,mode=700")
    for path, descriptor in descriptors.items():
        source = f"/proc/self/fd/{descriptor}"
        if os.path.isdir(source):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            # A file can be bound only over a file.
            os.close(os.open(path, os.O_CREAT))
        kernel.mount(source, path, kernel.BIND)
        os.close(descriptor)

    # bwrap masks parts of /proc, and then the kernel allows no fresh one: an empty folder hides it.
    for path in ("/dev/shm", "/proc"):
        kernel.mount("tmpfs", path, data_only | kernel.READ_ONLY, _EMPTY_FOLDER)
    kernel.drop_capabilities()
    return "/tmp"


def _limit(settings: dict[str, Any], alone: bool) -> None:
    """Set the resource limits.

    ``alone``: no other process has this user number, so that its threads can be counted.
    """
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_FSIZE: settings["scratch"],
        resource.RLIMIT_NOFILE: _MOST_DESCRIPTORS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: settings["cpu_seconds"],
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if alone:
        limits[resource.RLIMIT_NPROC] = max(settings["threads"], 1)
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # Code could raise a soft limit again, so the hard one is set as well.
        resource.setrlimit(kind, (value, value))
    # A write beyond the file size is then an error, and does not end the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
