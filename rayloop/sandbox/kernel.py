"""Namespaces, mounts, capabilities and Landlock of this process.

They are called by ctypes, since Python 3.11 has no functions for them.
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
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000
NEW_MOUNTS = 0x00020000
NEW_IPC = 0x08000000
_NAMES = {NEW_USER: "user", NEW_PID: "pid", NEW_NET: "net", NEW_MOUNTS: "mnt", NEW_IPC: "ipc"}
READ_ONLY = 1
NO_SUID = 2
NO_DEVICES = 4
NO_PROGRAMS = 8
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000
_PIDFD_OPEN = 434
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_ASK_VERSION = 1
_LANDLOCK_PATH_BENEATH = 1
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_REMOVE_FOLDER = 1 << 4
_REMOVE_FILE = 1 << 5
_MAKE_FOLDER = 1 << 7
_MAKE_FILE = 1 << 8
_TRUNCATE = 1 << 14
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version of Landlock -> number of file rights that it knows."""
_READING = _READ_FILE | _READ_FOLDER
_WRITING = (
    _READING | _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE | _TRUNCATE
)
_RIGHTS_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_TCP_BIND_AND_CONNECT = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def check(result: int, what: str) -> int:
    """Return ``result`` if it is not negative.

    Otherwise raises OSError with ``what`` and the name of the error: "userns refused: EPERM".
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} refused: {errno.errorcode.get(number, number)}")
    return result


def prctl(option: int, value: int, what: str) -> None:
    """Set an option of this process. Raises OSError with ``what``."""
    check(libc.prctl(option, value, 0, 0, 0), what)


def no_new_privileges() -> None:
    """Let no program that this process starts gain rights by set-user-id bits."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")


def adopt_orphans() -> None:
    """Adopt processes that a child leaves behind, so that this process can end them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1, "subreaper")


def die_with_parent(parent: int | None) -> None:
    """Let the kernel kill this process when the thread that forked it ends.

    A change of user cancels that: call again after one. ``parent``: the parent's pid, None where it
    has none in this namespace. Exits at once when the parent has already ended.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")
    # The kernel sends nothing for a parent that ended before prctl was called.
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def unshare(*kinds: int) -> None:
    """Enter new namespaces.

    Raises OSError, with all names: "unshare(mnt, ipc) refused: EPERM".
    """
    names = ", ".join(_NAMES[kind] for kind in kinds)
    check(libc.unshare(sum(kinds)), f"unshare({names})")


def set_namespace(descriptor: int, kind: int) -> None:
    """Enter the namespace of a descriptor. Raises OSError."""
    check(libc.setns(descriptor, kind), f"setns({_NAMES[kind]})")


def enter_user_namespace(inside: int) -> None:
    """Enter a new user namespace in which this process is user ``inside``. Raises OSError."""
    user = os.geteuid()
    group = os.getegid()
    # Without it /proc/self would belong to root after a change of user.
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
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
            error_name = errno.errorcode.get(error.errno or 0)
            raise OSError(error.errno, f"{name} of the userns refused: {error_name}") from error


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """Mount a filesystem on ``target``; with ``kind`` "none", change the existing mount.

    Raises OSError.
    """
    filesystem = None if kind == "none" else kind.encode()
    result = libc.mount(kind.encode(), target.encode(), filesystem, flags, options.encode())
    check(result, f"mount of {kind} on {target}")


def become(user: int, keep_read: bool = False) -> None:
    """Change this process's user for good.

    ``keep_read``: keep the one privilege of reading files that only their owner may read
    (CAP_DAC_READ_SEARCH).
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
    """Give up every capability, also for programs that this process starts."""
    # The bounding set first: to change it takes a capability that the last line gives up.
    for capability in range(64):
        # A number beyond the kernel's last capability is refused.
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    set_capabilities(0)


def set_capabilities(mask: int) -> None:
    """Set the capabilities of this process to the bits of ``mask``. Raises OSError."""
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(struct.pack("6I", mask, mask, 0, 0, 0, 0))
    check(libc.capset(header, data), "capset")


def first_to_go() -> None:
    """Let the kernel end this process first when the machine runs out of memory."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file,
    ):
        file.write("1000")


def pidfd(pid: int) -> int:
    """A descriptor of the process, which stays with it when its pid is used again."""
    return check(libc.syscall(_PIDFD_OPEN, pid, 0), "pidfd_open")


def landlock_version() -> int:
    """The version of the kernel's Landlock, or 0 if it has none.

    It has none before 5.13, or when Landlock is not among its security modules.
    """
    return max(0, libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_ASK_VERSION))


def restrict(read: Iterable[str], write: Iterable[str] = ()) -> None:
    """Let this process and its children open only ``read``, change only ``write``, run nothing.

    Landlock does it (Linux 5.13), without a privilege. Versions 4 and 6 also forbid TCP ports,
    abstract sockets of others and signals to other processes. Metadata stays visible (stat), and
    changeable without a filter of system calls (chmod, utime). Raises OSError.
    """
    version = landlock_version()
    if not version:
        raise OSError("Landlock is not in this kernel")
    file_rights = (1 << _FILE_RIGHTS[min(version, 5)]) - 1
    # A kernel refuses fields that it does not know, so it gets the fields of its version.
    fields = [file_rights]
    if version >= 4:
        fields.append(_TCP_BIND_AND_CONNECT)
    if version >= 6:
        fields.append(_ABSTRACT_SOCKETS_AND_SIGNALS)
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = libc.syscall(_LANDLOCK_CREATE_RULESET, buffer, len(attributes), 0)
    ruleset = check(result, "landlock_create_ruleset")
    for path in read:
        _allow(ruleset, path, _READING & file_rights)
    for path in write:
        _allow(ruleset, path, _WRITING & file_rights)

    # Without it the kernel lets only an administrator restrict a process.
    no_new_privileges()
    check(libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Add a rule for a path; one that does not exist needs none. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return

    # The kernel refuses a rule that gives a file the rights of folders.
    if not os.path.isdir(path):
        rights &= _RIGHTS_OF_FILES
    rule = struct.pack("=Qi", rights, descriptor)
    buffer = ctypes.create_string_buffer(rule, len(rule))
    result = libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, buffer, 0)
    check(result, "landlock_add_rule")
    os.close(descriptor)
