"""Whether two mathematical texts are equivalent, by ``math-verify`` in a child process, which is
killed when a pair takes too long. Sympy may compute for hours on a policy's text, and its own
deadlines need signals of the main thread.
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

LONGEST = 1000
"""Characters of an expression; a longer one is not parsed."""
_MEMORY = 2 << 30
"""Bytes of address space of the child."""
DECISIONS = {"true": True, "false": False}
"""What the child writes -> whether the texts are equivalent; anything else is no decision."""
_STARTING = 60.0
"""Seconds in which the child must have imported sympy."""
_PROGRAM = Path(__file__).with_name("math_child.py")


class MathVerifier:
    """One child process, started with the first pair.

    Calls from several threads wait for each other.
    """

    def __init__(self, timeout: float, confirm: bool = True) -> None:
        """``timeout``: seconds for a pair.

        Without ``confirm`` what math-verify accepts is accepted, rounded and half-read texts too,
        as published rewards do. Raises ConfigError without ``math-verify``.
        """
        if find_spec("math_verify") is None:
            raise ConfigError('mathematical answers need math-verify: pip install "rayloop[math]"')
        self._timeout, self._confirm, self._lock = timeout, confirm, threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def same(self, reference: str, answer: str) -> bool | None:
        """Whether ``answer`` is equivalent to ``reference``, both with or without ``$``.

        None when that cannot be decided: a text is not read as a whole, it took too long, or the
        child died of it. Raises InfrastructureFailure when no child can be started.
        """
        if reference.strip() == answer.strip():
            return True
        if len(answer) >= LONGEST:
            return False
        with self._lock:
            child = self._child = self._child or self._started()
            assert child.stdin is not None
            try:
                child.stdin.write(
                    json.dumps([_marked(reference), _marked(answer), self._confirm]) + "\n"
                )
                child.stdin.flush()
            except OSError:
                self._end()
                return None
            found = _line(child, self._timeout)
            # A late answer would be read as the one to the next pair.
            if found is None:
                self._end()
            return DECISIONS.get(found or "")

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            # -P keeps the script's folder off the module path: its names would hide others.
            [sys.executable, "-P", _PROGRAM, str(_MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if _line(child, _STARTING) != '"ready"':
            child.kill()
            child.wait()
            raise InfrastructureFailure(f"math-verify did not start within {_STARTING:g} seconds")
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):  # what was never read is lost
                    assert pipe is not None
                    pipe.close()


def _line(child: subprocess.Popen[str], timeout: float) -> str | None:
    """The next line of the child, None when it did not come in time.

    It writes whole lines, one for each that it reads.
    """
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], timeout)
    return child.stdout.readline().strip() or None if ready else None


def _marked(text: str) -> str:
    """In dollars, or math-verify would not take LaTeX for such."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"
