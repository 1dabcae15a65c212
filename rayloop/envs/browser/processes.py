"""The processes of a browser, from /proc."""

from contextlib import suppress

from rayloop.sandbox.memory import filled as filled
from rayloop.sandbox.memory import tree as tree


def marked(root: int, mark: str) -> int | None:
    """Return the first descendant of ``root`` with the argument ``mark``; None without one."""
    for pid in tree(root)[1:]:
        if mark in command_line(pid):
            return pid
    return None


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty when it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode(errors="replace").split("\0")
    return []


def renders(pid: int) -> bool:
    """Return whether it is the process of a page.

    Chromium rewrites its command line with blanks between the arguments.
    """
    return "--type=renderer" in " ".join(command_line(pid))
