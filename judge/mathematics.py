"""Whether two mathematical texts are equivalent, by ``math-verify`` in a child process.

The child is killed when a pair takes too long. Sympy may compute for hours on a policy's text, and
its own deadlines need signals of the main thread.
"""

import json
import select
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from rayloop.core.failures import ConfigError, InfrastructureFailure

_MAX_CHARACTERS = 1000
"""Characters of an answer from which it is not parsed."""
_MEMORY_BYTES = 2 << 30
"""Bytes of address space of the child."""
_DECISIONS = {"true": True, "false": False}
"""Whether the texts are equivalent, by the child's line; any other line is not a decision."""
_START_TIMEOUT_S = 60.0
"""Seconds in which the child must have imported sympy."""
_PROGRAM = Path(__file__).with_name("math_child.py")


class MathVerifier:
    """One child process, started with the first pair.

    Calls from several threads wait for each other.
    """

    def __init__(self, timeout: float, confirm: bool = True) -> None:
        """Make a verifier; ``timeout`` is in seconds for a pair.

        Without ``confirm`` everything that math-verify accepts is accepted, rounded and half-read
        texts too, as published rewards do. Raises ConfigError without ``math-verify``.
        """
        if find_spec("math_verify") is None:
            raise ConfigError('mathematical answers need math-verify: pip install "rayloop[math]"')
        self._timeout = timeout
        self._confirm = confirm
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def same(self, reference: str, answer: str) -> bool | None:
        """Whether ``answer`` is equivalent to ``reference``, both with or without ``$``.

        None when that cannot be decided: a text is not read completely, the comparison took too
        long, or the child died of it. Raises InfrastructureFailure when no child can be started.
        """
        if reference.strip() == answer.strip():
            return True
        if len(answer) >= _MAX_CHARACTERS:
            return False
        request = json.dumps([_in_dollars(reference), _in_dollars(answer), self._confirm])
        with self._lock:
            if self._child is None:
                self._child = self._start()
            child = self._child
            assert child.stdin is not None
            try:
                child.stdin.write(request + "\n")
                child.stdin.flush()
            except OSError:
                self._end()
                return None
            line = _next_line(child, self._timeout)
            # A late answer would be read as the one to the next pair.
            if line is None:
                self._end()
            return _DECISIONS.get(line or "")

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            # -P keeps the script's folder off the module path: its names would hide others.
            [sys.executable, "-P", _PROGRAM, str(_MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if _next_line(child, _START_TIMEOUT_S) != '"ready"':
            child.kill()
            child.wait()
            raise InfrastructureFailure(
                f"math-verify did not start within {_START_TIMEOUT_S:g} seconds"
            )
        return child

    def _end(self) -> None:
        child = self._child
        self._child = None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            # Closing flushes a text that the child never read.
            with suppress(OSError):
                pipe.close()


def _next_line(child: subprocess.Popen[str], timeout: float) -> str | None:
    """The next line of the child, None when it did not come in time.

    The child writes complete lines, one for each that it reads.
    """
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], timeout)
    if not ready:
        return None
    return child.stdout.readline().strip() or None


def _in_dollars(text: str) -> str:
    """The text in dollars, which math-verify needs to read it as LaTeX."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"
