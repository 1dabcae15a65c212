"""Landlock: this process, and all it starts, may open only what is listed. No privilege needed; Linux 5.13."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from rayloop.sandbox import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_ASK_VERSION = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _REMOVE_FOLDER, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_FOLDER, _MAKE_FILE, _TRUNCATE = 1 << 7, 1 << 8, 1 << 14
_HANDLED = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version -> number of file rights that it knows."""
_READ = _READ_FILE | _READ_FOLDER
_WRITE = _READ | _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


def version() -> int:
    """Of the kernel's Landlock; 0 without one (older than 5.13, or not among its security modules)."""
    return max(0, kernel.system_call(_CREATE, None, 0, _ASK_VERSION))


def restrict(read: Iterable[str], write: Iterable[str] = ()) -> None:
    """From now on only ``read`` can be opened for reading and ``write`` changed, no program run, and, where the kernel knows how
    (versions 4 and 6), no TCP port bound or connected to, no abstract socket of others reached and no other process signalled.

    Metadata stays visible (stat), and changeable without a filter of system calls (chmod, utime). Raises OSError.
    """
    known = version()
    if not known:
        raise OSError("Landlock is not in this kernel")
    handled = (1 << _HANDLED[min(known, 5)]) - 1
    parts = [handled, *([3] if known >= 4 else []), *([3] if known >= 6 else [])]
    attributes = struct.pack(f"{len(parts)}Q", *parts)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    rules = kernel.check(kernel.system_call(_CREATE, buffer, len(attributes), 0), "landlock_create_ruleset")
    for paths, rights in ((read, _READ), (write, _WRITE)):
        for path in paths:
            _allow(rules, path, rights & handled)
    kernel.no_new_privileges()
    kernel.check(kernel.system_call(_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule
    rights = rights if os.path.isdir(path) else rights & _OF_FILES
    rule = struct.pack("=Qi", rights, place)
    kernel.check(kernel.system_call(_ADD, rules, 1, ctypes.create_string_buffer(rule, len(rule)), 0), "landlock_add_rule")
    os.close(place)
