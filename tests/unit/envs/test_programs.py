"""What the host reads of a program, and how much of the machine it lets a program take, without a
sandbox around it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rayloop.core.failures import EnvironmentFailed
from rayloop.envs.programs import PLACE, FusionSandbox, _called

MIB = 1 << 20
FILLS = (
    "import mmap, time\nm = mmap.mmap(-1, 256 << 20)\nfor k in range(256): m[k << 20:(k + 1) << 20]"
    " = b'x' * (1 << 20)\nprint('full', flush=True); time.sleep(60)"
)


def test_an_output_that_has_no_end_is_not_read_further() -> None:
    began = time.monotonic()
    code, answer = _called(["cat", "/dev/zero"], b"", 60, most=MIB)
    assert code is None
    assert len(answer) == MIB
    assert time.monotonic() - began < 30


def test_what_is_written_before_the_end_is_cut_too() -> None:
    code, answer = _called(["head", "-c", str(4 * MIB), "/dev/zero"], b"", 60, most=MIB)
    assert code in (0, None)
    assert len(answer) == MIB


def test_shared_memory_counts() -> None:
    code, answer = _called([sys.executable, "-c", FILLS], b"", 60, most=MIB, filled=96 * MIB)
    assert code is None
    assert answer in (b"", b"full\n")


@pytest.mark.parametrize("taken", ["w", "out", "err"])
def test_programs_run_elsewhere_where_a_folder_of_this_machine_has_their_name(
    taken: str, tmp_path: Path
) -> None:
    """Such as the Python of a run below /tmp/w, which the sandbox shows."""
    (tmp_path / taken).mkdir()
    temporary = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", f"{PLACE}; pwd; > ../out && > ../err"],
        cwd=tmp_path,
        env=temporary,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    place = Path(done.stdout.decode().strip())
    assert place.name == "w"
    assert place.parent.parent == tmp_path


@pytest.fixture
def endless() -> Iterator[str]:
    """The address of a server whose answer does not end."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b" " * MIB)
            except OSError:
                pass

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_servers_answer_that_has_no_end_is_not_read_further(endless: str) -> None:
    sandbox = FusionSandbox(url=endless, files=1).build()
    with pytest.raises(EnvironmentFailed, match="longer than"):
        sandbox.exec(("true",), timeout=5)
