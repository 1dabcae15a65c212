"""Levels of confinement, limits, and the errors of the sandbox."""

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How strongly code is confined, weakest first; each level adds to the one before it."""

    PROCESS = "process"
    """A process with limits and an empty environment, and a separate user if root starts it.

    It does not protect from code that attacks.
    """
    FILTERED = "filtered"
    """Only the system calls of rayloop/sandbox/calls.json, and only Python's own files (Landlock).

    The code cannot write files or start threads.
    """
    NAMESPACES = "namespaces"
    """No processes, files or network of this machine.

    There are 64 MiB for files, and threads.
    """

    @property
    def rank(self) -> int:
        """0 is the weakest."""
        return list(Level).index(self)


@dataclass(frozen=True)
class Options:
    """The resources of each interpreter.

    ``preload``: modules that all share from the start; one that is missing is a failure.
    """

    memory: int = 2 << 30
    """Bytes of address space."""
    scratch: int = 64 << 20
    """Bytes of files (with namespaces), and of the largest one."""
    threads: int = 64
    """The number of threads with namespaces; other levels allow none."""
    cpu_seconds: int = 3600
    """The limit of an interpreter's whole life; each call also has a deadline."""
    spares: int = 2
    """Interpreters that are started before they are needed."""
    preload: tuple[str, ...] = ("numpy", "PIL.Image", "matplotlib.pyplot")


class SandboxFailed(Exception):
    """The sandbox itself did not work: it cannot be started, or its fork server was ended.

    The code in it did not cause that.
    """


class CodeFailed(Exception):
    """The code ended its interpreter, or forged an answer.

    The interpreter has ended; the code caused that.
    """


class CodeDeadline(CodeFailed):
    """The code did not end in time. Its interpreter was ended."""
