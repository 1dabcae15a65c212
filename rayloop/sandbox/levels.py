"""The level that this machine supports, proven by attacks and not by version numbers."""

import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rayloop.sandbox.host import Sandbox
from rayloop.sandbox.options import CodeDeadline, CodeFailed, Level, Options, SandboxFailed

ATTACKS: Mapping[str, str] = {
    "run a program": "import subprocess; subprocess.run(['/usr/bin/true'], check=True)",
    "fork": "import os; os.fork() or os._exit(0)",
    "open a socket": "import socket; socket.socket()",
    "read a file of this machine": "open({file!r}).read()",
    "write a file of this machine": "open({file!r}, 'w')",
    "change a file's mode": "import os; os.chmod({file!r}, 0o777)",
    "signal the run": "import os; os.kill({pid}, 0)",
    "read the run's variables": "open('/proc/{pid}/environ').read()",
    "take 3 GB": "bytearray(3 << 30)",
    "take memory outside the limits": "import os; os.memfd_create('x')",
    "make a user namespace": "import ctypes; 1 / (ctypes.CDLL(None).unshare(0x10000000) == 0)",
}
"""Name -> code that raises when the sandbox holds it.

``file``: one that everybody may read and write; ``pid``: this process.
"""
_ATTACK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Reached:
    """The strongest level that works here.

    ``level``: None when no level works. ``reasons``: why each stronger level does not work.
    ``held``: the names of the attacks that fail at ``level``.
    """

    level: Level | None
    reasons: Mapping[Level, str] = field(default_factory=dict)
    held: tuple[str, ...] = ()

    def __str__(self) -> str:
        reasons = "".join(f"; {level}: {reason}" for level, reason in self.reasons.items())
        if self.level is None:
            return f"none{reasons}"
        attacks = f"{len(self.held)} of {len(ATTACKS)} attacks held"
        successful_attacks = _missing_from(self.held)
        if successful_attacks:
            attacks += f", not: {successful_attacks}"
        return f"{self.level} ({attacks}){reasons}"

    def short_of(self, minimum: Level) -> bool:
        """Whether the level is weaker than ``minimum``."""
        return self.level is None or self.level.rank < minimum.rank


@functools.cache
def reached() -> Reached:
    """Try the levels, strongest first, each from its start to its attacks.

    Half a second, once per process.
    """
    reasons: dict[Level, str] = {}
    for level in reversed(Level):
        try:
            held = attack(level)
        except (SandboxFailed, CodeFailed) as error:
            reasons[level] = str(error)
            continue
        # The weakest is returned whatever it holds: ``minimum`` decides if that is enough.
        if level == Level.PROCESS or len(held) == len(ATTACKS):
            return Reached(level, reasons, held)
        reasons[level] = f"not held: {_missing_from(held)}"
    return Reached(None, reasons)


def _missing_from(held: tuple[str, ...]) -> str:
    """The names of all other attacks, with commas between them."""
    return ", ".join(name for name in ATTACKS if name not in held)


def attack(level: Level) -> tuple[str, ...]:
    """The names of the attacks that fail at ``level``.

    Raises SandboxFailed when the level cannot be started, or does not end a hang.
    """
    folder = tempfile.mkdtemp(prefix="sandbox-test-")
    os.chmod(folder, 0o755)
    bait = Path(folder) / "file"
    bait.write_text("bait", encoding="utf-8")
    # Everybody may change it: then an attack cannot fail for the file's permissions alone.
    bait.chmod(0o666)
    sandbox = Sandbox(level, Options(preload=("subprocess", "socket", "ctypes"), spares=1))
    held = []
    try:
        for name, code in ATTACKS.items():
            if _holds(sandbox, code.format(file=str(bait), pid=os.getpid())):
                held.append(name)
        return tuple(held)
    finally:
        sandbox.close()
        shutil.rmtree(folder, ignore_errors=True)


def _holds(sandbox: Sandbox, code: str) -> bool:
    """Whether the code raises, or is ended."""
    interpreter = sandbox.interpreter(_ATTACK_TIMEOUT_S)
    try:
        return interpreter.run(code, _ATTACK_TIMEOUT_S).error is not None
    except CodeDeadline:
        # It still runs, so nothing refused it. This error is a CodeFailed too, so it comes first.
        return False
    except CodeFailed:
        return True
    finally:
        interpreter.close()
