"""The processes of a browser, from /proc."""

from contextlib import suppress

from rayloop.sandbox.memory import filled as filled
from rayloop.sandbox.memory import tree as tree


def marked(root: int, mark: str) -> int | None:
    """The first descendant of ``root`` whose command line has the argument ``mark``; None when
    there is none.
    """
    for pid in tree(root)[1:]:
        if mark in command_line(pid):
            return pid
    return None


def command_line(pid: int) -> list[str]:
    """Its arguments; empty when the process is gone."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode(errors="replace").split("\0")
    return []


def renders(pid: int) -> bool:
    """Whether it is the process of a page.

    Chromium writes its own command line anew, with blanks between.
    """
    return "--type=renderer" in " ".join(command_line(pid))
