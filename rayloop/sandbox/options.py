"""Levels of confinement, limits, and the errors of the sandbox."""

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How strongly, weakest first. Each has what those before it have."""

    PROCESS = "process"
    """A process with limits and an empty environment; started by root, of a user of its own.

    No protection from code that tries.
    """
    FILTERED = "filtered"
    """No system calls but those of rayloop/sandbox/calls.json, no files but Python's own
    (Landlock), none to write, no threads.
    """
    NAMESPACES = "namespaces"
    """Nothing of this machine is there: processes, files, network.

    64 MiB of files of its own, threads.
    """

    @property
    def rank(self) -> int:
        """0 is the weakest."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True)
class Options:
    """What each interpreter may use.

    ``preload``: modules that all share from the start; one that is missing is a failure.
    """

    memory: int = 2 << 30
    """Bytes of address space."""
    scratch: int = 64 << 20
    """Bytes of files (with namespaces), and of the largest one."""
    threads: int = 64
    """With namespaces; elsewhere there are none."""
    cpu_seconds: int = 3600
    """Of an interpreter's whole life; a call has a deadline of its own."""
    spares: int = 2
    """Interpreters that wait, ready, for the next call."""
    preload: tuple[str, ...] = ("numpy", "PIL.Image", "matplotlib.pyplot")


class SandboxFailed(Exception):
    """The sandbox itself did not work: it cannot be started, or its fork server was ended.

    The code in it did not cause that.
    """


class CodeFailed(Exception):
    """The code ended its interpreter, or forged an answer.

    The interpreter is gone; the code caused that.
    """


class CodeDeadline(CodeFailed):
    """The code did not end in time. Its interpreter was ended."""
