"""The host's side of an interpreter, against a process and a socket of the test's own."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.sandbox import cells, frames
from rayloop.sandbox.host import Interpreter, _Server, fonts_folder
from rayloop.sandbox.options import Level, Options, SandboxFailed


@contextmanager
def sleeping() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def interpreter(pid: int) -> tuple[Interpreter, socket.socket]:
    """And the end of the connection at which its code would be."""
    ours, theirs = socket.socketpair()
    server: Any = None
    return Interpreter(ours, os.pidfd_open(pid), None, server), theirs


def test_why_an_image_cannot_be_read_is_a_short_text_whatever_code_says() -> None:
    with sleeping() as pid:
        python, theirs = interpreter(pid)
        frames.send(theirs, {"call": 1, "refused": ["\ud83d" * 10_000, ""]})
        assert python.images({}, 5) == "?" * cells.MAX_ERROR_CHARACTERS
        python.close()
        theirs.close()


def test_a_call_that_ends_after_its_interpreter_was_closed_stops_no_other() -> None:
    """Descriptors are numbered anew at once, so the number may be the next interpreter's."""
    with sleeping() as pid, sleeping() as other:
        python, theirs = interpreter(pid)
        number = python._pidfd
        python.close()
        theirs.close()
        handle = os.pidfd_open(other)
        os.dup2(handle, number)
        try:
            python._signal(signal.SIGSTOP)
            time.sleep(0.3)
            assert psutil.Process(other).status() != psutil.STATUS_STOPPED
        finally:
            for one in {handle, number}:
                os.close(one)


def test_a_server_that_gets_no_folder_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(prefix: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    # Frees what other tests left to the garbage collector, which would change the number below.
    gc.collect()
    before = psutil.Process().num_fds()
    failures = []
    for _ in range(3):
        with pytest.raises(SandboxFailed, match="No space left") as raised:
            _Server(Level.FILTERED, Options())
        # Its traceback holds the frame, and with it each socket that was left open.
        failures.append(raised.value)
    assert psutil.Process().num_fds() == before


def test_fonts_of_a_folder_that_cannot_be_written_are_not_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "file"))
    fonts_folder.cache_clear()
    try:
        assert fonts_folder() is None
    finally:
        fonts_folder.cache_clear()
