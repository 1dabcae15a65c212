"""Namespaces, mounts, capabilities and Landlock of this process, by ctypes: Python 3.11 has no
functions for them.
"""

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Iterable

libc = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()
NEW_USER, NEW_PID, NEW_NET, NEW_MOUNTS, NEW_IPC = (
    0x10000000,
    0x20000000,
    0x40000000,
    0x00020000,
    0x08000000,
)
_NAMES = {NEW_USER: "user", NEW_PID: "pid", NEW_NET: "net", NEW_MOUNTS: "mnt", NEW_IPC: "ipc"}
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, BIND, RECURSIVE, PRIVATE = (
    1,
    2,
    4,
    8,
    0x1000,
    0x4000,
    0x40000,
)
_PIDFD_OPEN = 434
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP = 1, 4, 8, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
CAP_DAC_READ_SEARCH = 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _REMOVE_FOLDER, _REMOVE_FILE = (
    1 << bit for bit in range(6)
)
_MAKE_FOLDER, _MAKE_FILE, _TRUNCATE = 1 << 7, 1 << 8, 1 << 14
_HANDLED = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version -> number of file rights that it knows."""
_READING = _READ_FILE | _READ_FOLDER
_WRITING = (
    _READING | _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE | _TRUNCATE
)
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


def check(result: int, what: str) -> int:
    """``result``, or OSError with ``what`` and the name of the error: "userns refused: EPERM"."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} refused: {errno.errorcode.get(number, number)}")
    return result


def prctl(option: int, value: int, what: str) -> None:
    """Raises OSError with ``what``."""
    check(libc.prctl(option, value, 0, 0, 0), what)


def no_new_privileges() -> None:
    """Programs that this process starts gain no rights by set-user-id bits."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")


def adopt_orphans() -> None:
    """What a child leaves behind becomes a child of this process, so that it can be ended."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1, "subreaper")


def die_with_parent(parent: int | None) -> None:
    """SIGKILL when the thread that forked this process ends.

    A change of user cancels that: call again after one. ``parent``: the parent's pid, None where it
    has none in this namespace. Ends at once when the parent is gone already.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")
    # The kernel sends nothing for a parent that ended before prctl was called.
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def unshare(*kinds: int) -> None:
    """Raises OSError, with all names: "unshare(mnt, ipc) refused: EPERM"."""
    check(libc.unshare(sum(kinds)), f"unshare({', '.join(_NAMES[kind] for kind in kinds)})")


def set_namespace(descriptor: int, kind: int) -> None:
    """Enter the namespace of a descriptor. Raises OSError."""
    check(libc.setns(descriptor, kind), f"setns({_NAMES[kind]})")


def enter_user_namespace(inside: int) -> None:
    """A user namespace of its own in which this process is user ``inside``. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    libc.prctl(
        _PR_SET_DUMPABLE, 1, 0, 0, 0
    )  # after a change of user /proc/self would belong to root
    check(libc.unshare(NEW_USER), "userns")
    # Without privileges the kernel takes a gid_map only after setgroups is denied.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {user} 1"),
        ("gid_map", f"{inside} {group} 1"),
    ):
        try:
            with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{name} of the userns refused: {errno.errorcode.get(error.errno or 0)}",
            ) from error


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """``kind`` "none" changes the mount that is there."""
    filesystem = None if kind == "none" else kind.encode()
    check(
        libc.mount(kind.encode(), target.encode(), filesystem, flags, options.encode()),
        f"mount of {kind} on {target}",
    )


def become(user: int, keep_read: bool = False) -> None:
    """Be ``user`` for good.

    ``keep_read``: with the one privilege of reading what its owner alone may (CAP_DAC_READ_SEARCH).
    """
    if keep_read:
        prctl(_PR_SET_KEEPCAPS, 1, "keepcaps")
    # The user comes last: without root's privileges the groups could not be changed.
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if keep_read:
        # The change of user empties the effective set; keepcaps saves the permitted one alone.
        set_capabilities(1 << CAP_DAC_READ_SEARCH)


def drop_capabilities() -> None:
    """Give up every capability, for programs that are started too."""
    # The bounding set first: to change it takes a capability that the last line gives up.
    for capability in range(64):
        # A number beyond the kernel's last capability is refused.
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    set_capabilities(0)


def set_capabilities(mask: int) -> None:
    """Have the capabilities of a bit mask, and no others. Raises OSError."""
    header = struct.pack("Ii", 0x20080522, 0)
    data = struct.pack("6I", mask, mask, 0, 0, 0, 0)
    check(
        libc.capset(ctypes.create_string_buffer(header), ctypes.create_string_buffer(data)),
        "capset",
    )


def first_to_go() -> None:
    """When the machine runs out of memory, this process is ended first."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file,
    ):
        file.write("1000")


def pidfd(pid: int) -> int:
    """A descriptor of the process, which no other can take the place of."""
    return check(libc.syscall(_PIDFD_OPEN, pid, 0), "pidfd_open")


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 without one (older than 5.13, or not among its security modules)."""
    return max(0, libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION))


def restrict(read: Iterable[str], write: Iterable[str] = ()) -> None:
    """Landlock (Linux 5.13, no privilege): this process and its children open only ``read``, change
    only ``write``, run nothing. Versions 4 and 6 also forbid TCP ports, abstract sockets of others
    and signals to other processes. Metadata stays visible (stat), and changeable without a filter
    of system calls (chmod, utime). Raises OSError.
    """
    known = landlock_version()
    if not known:
        raise OSError("Landlock is not in this kernel")
    handled = (1 << _HANDLED[min(known, 5)]) - 1
    # A kernel refuses fields that it does not know, so it gets only those of its version.
    parts = [handled, *([3] if known >= 4 else []), *([3] if known >= 6 else [])]
    attributes = struct.pack(f"{len(parts)}Q", *parts)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    rules = check(
        libc.syscall(_CREATE_RULESET, buffer, len(attributes), 0), "landlock_create_ruleset"
    )
    for paths, rights in ((read, _READING), (write, _WRITING)):
        for path in paths:
            _allow(rules, path, rights & handled)

    # Without it the kernel lets only an administrator restrict a process.
    no_new_privileges()
    check(libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule

    # The kernel refuses a rule that gives a file the rights of folders.
    rights = rights if os.path.isdir(path) else rights & _OF_FILES
    rule = struct.pack("=Qi", rights, place)
    check(
        libc.syscall(_ADD_RULE, rules, 1, ctypes.create_string_buffer(rule, len(rule)), 0),
        "landlock_add_rule",
    )
    os.close(place)
