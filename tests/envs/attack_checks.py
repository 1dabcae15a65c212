"""What is looked at outside after an attack, besides what it printed: each check returns whether it
got through.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rayloop.envs.interpreter.environment import PythonInterpreter
from rayloop.sandbox import cells
from rayloop.sandbox.host import CodeResult, Interpreter, Sandbox
from rayloop.sandbox.options import CodeFailed

MIB = 1 << 20
SUSPECT = 0.3
"""Seconds of processor time in the second after an answer."""


@dataclass(frozen=True)
class Seen:
    """``last``: the answer that the attack's call gave, None when it gave none; ``grown``: MiB of
    this process during the call.
    """

    sandbox: Sandbox
    target: Interpreter
    file: Path
    canary: subprocess.Popen[bytes]
    cold: str
    last: CodeResult | None
    text: str
    grown: int


def said(target: Interpreter, code: str, seconds: float) -> tuple[CodeResult | None, str]:
    """The answer, and what the call printed, its error last."""
    try:
        given = target.run(code, seconds)
    except CodeFailed as error:
        return None, str(error)
    return given, given.text + (given.error or "").replace("THROUGH", "")


@contextlib.contextmanager
def growing() -> Iterator[Callable[[], int]]:
    """Yields a function of how many MiB this process was larger than now, at most, until the end."""
    stop, most, before = threading.Event(), [0], _resident()

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], _resident() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        stop.set()
        watcher.join()


def _resident() -> int:
    return (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        // MIB
    )


def _canary(seen: Seen) -> bool:
    time.sleep(0.05)
    return seen.canary.poll() is not None


def _file(seen: Seen) -> bool:
    state = seen.file.stat()
    return state.st_size != 6 or state.st_mtime < 10 or state.st_mode & 0o777 != 0o666


def _survivors(seen: Seen) -> bool:
    seen.target.close()
    time.sleep(2.5)
    return any(b"survivor-x" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/comm"))


def _late(seen: Seen) -> bool:
    return "LATE" in said(seen.target, "import time; time.sleep(.1)", 5)[1]


def _server(seen: Seen) -> bool:
    """The fork server is gone, after it had time to clean up."""
    before = seen.sandbox.pid
    seen.target.close()
    time.sleep(2.5)
    other = seen.sandbox.interpreter()
    other.close()
    return seen.sandbox.pid != before


def _cpu(seen: Seen) -> bool:
    """Processor time between two calls."""
    before = _ticks()
    time.sleep(1.0)
    after = _ticks()
    used = sum(after[pid] - before.get(pid, 0) for pid in after if pid != str(os.getpid()))
    return used / os.sysconf("SC_CLK_TCK") > SUSPECT


def _ticks() -> dict[str, int]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            found[folder.name] = int(fields[11]) + int(fields[12])
    return found


def _became(seen: Seen) -> bool:
    """Another program took the interpreter's place: there is no traceback then."""
    return "ended the interpreter" in seen.text


def _memory(seen: Seen) -> bool:
    return seen.grown > 300


def _limits(seen: Seen) -> bool:
    given = seen.last
    if given is None:
        return False
    long = (
        len(given.text) > cells.MAX_TEXT_CHARACTERS + 100
        or len(given.error or "") > cells.MAX_ERROR_CHARACTERS
    )
    return (
        long
        or len(given.images) > cells.MOST_IMAGES
        or given.dropped < 0
        or not 0 <= given.seconds < 1e6
    )


def _helpers(seen: Seen) -> bool:
    """A later call, with what the attack has replaced."""
    try:
        given = seen.target.run("1/0", 5)
    except CodeFailed:
        return False
    return len(given.text) > cells.MAX_TEXT_CHARACTERS + 100 or not 0 <= given.seconds < 1e6


def _environment(seen: Seen) -> bool:
    """The environment raises for what it was answered: the episode would be excluded, not scored."""
    if seen.last is None:
        return False
    environment = PythonInterpreter.__new__(PythonInterpreter)
    environment._settings, environment._shown_images = PythonInterpreter.Settings(), 0
    try:
        environment._answered(seen.last, time.monotonic() + 5)
    except Exception:
        return True
    return False


def _others(seen: Seen) -> bool:
    """Another interpreter is not as it should be."""
    seen.target.close()
    other = seen.sandbox.interpreter()
    try:
        code = (
            "import json, numpy; print(json.dumps([int(numpy.ones(1)[0]), __builtins__ is not"
            " None]))"
        )
        return other.run(code, 5).text != "[1, true]\n"
    finally:
        other.close()


def _random(seen: Seen) -> bool:
    assert seen.last is not None
    other = seen.sandbox.interpreter()
    try:
        second = other.run(
            "import random, numpy\nprint(random.random(), numpy.random.rand())", 5
        ).text
    finally:
        other.close()
    return any(one == two for one, two in zip(seen.last.text.split(), second.split(), strict=True))


def _flock(seen: Seen) -> bool:
    """A program outside cannot have the lock."""
    with open("/usr/bin/true", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _cache(seen: Seen) -> bool:
    """Bits from one interpreter to another: one drops or reads a page of a file of /usr, the other
    sees whether it is in memory.
    """
    file = f"import os\nf = os.open({seen.cold!r}, os.O_RDONLY)"
    look = (
        f"{file}; b = bytearray(10)\ntry: os.preadv(f, [b], 16384, os.RWF_NOWAIT); print(1)\n"
        "except BlockingIOError: print(0)\nexcept OSError as e: print(e)"
    )
    other, bits, read = seen.sandbox.interpreter(), (0, 1, 0, 1, 1), []
    for bit in bits:
        said(
            seen.target,
            f"{file}; os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)"
            + "; os.pread(f, 10, 16384)" * bit,
            5,
        )
        read.append(said(other, look, 5)[1].strip())
    other.close()
    return read == [str(bit) for bit in bits]


def _held(seen: Seen) -> bool:
    """What matters is the time that it took."""
    return False


CHECKS: Mapping[str, Callable[[Seen], bool]] = {
    "canary": _canary,
    "file": _file,
    "survivors": _survivors,
    "late": _late,
    "server": _server,
    "cpu": _cpu,
    "became": _became,
    "memory": _memory,
    "text": _limits,
    "nan": _limits,
    "negative": _limits,
    "helpers": _helpers,
    "environment": _environment,
    "others": _others,
    "random": _random,
    "flock": _flock,
    "cache": _cache,
    "deadline": _held,
}
