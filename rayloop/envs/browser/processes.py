"""The processes of a browser, from /proc: the tree, and the memory that each filled itself."""

import os
from collections.abc import Iterator
from contextlib import suppress

PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(root: int) -> list[int]:
    """The process and its descendants, parents first; empty when it is gone."""
    found = [root] if os.path.exists(f"/proc/{root}") else []
    for pid in found:
        found += _children(pid)
    return found


def marked(root: int, mark: str) -> int | None:
    """The first descendant of ``root`` whose command line has the argument ``mark``; None when there is none."""
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
    """Whether it is the process of a page. Chromium writes its own command line anew, with blanks between."""
    return "--type=renderer" in " ".join(command_line(pid))


def filled(pid: int) -> int:
    """Bytes of memory that the process alone has written to: resident ones without what it shares; 0 when it is gone."""
    with suppress(OSError):
        with open(f"/proc/{pid}/statm", encoding="utf-8") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * PAGE
    return 0


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file:
                yield from map(int, file.read().split())
