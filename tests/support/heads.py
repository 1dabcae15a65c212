"""A Ray head with its dashboard, as a site would run it: its Python has the dependencies and not
this checkout.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError

from rayloop.core.files import new_secret
from rayloop.launch.network import block
from rayloop.launch.ray_variables import node_settings
from tests.support.runs import ROOT, TAG, eventually, tagged

PORTS = (20_000, 29_999)
"""Below what the kernel gives to outgoing connections: a port found free there stays free until its
service starts.
"""
SERVICES = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
    "ray-client-server-port",
)


@dataclass(frozen=True)
class Head:
    dashboard: str
    token: Path | None
    python: Path
    tag: str

    def status(self, path: str, *, with_token: bool = True) -> int:
        """The HTTP status of a page of the dashboard; 0 when nobody listens."""
        try:
            return int(self._open(path, with_token).status)
        except HTTPError as error:
            return error.code
        except OSError:
            return 0

    def read(self, path: str) -> bytes:
        return bytes(self._open(path, True).read())

    def _open(self, path: str, with_token: bool) -> object:
        request = urllib.request.Request(self.dashboard + path)
        if with_token and self.token is not None:
            request.add_header("Authorization", f"Bearer {self.token.read_text(encoding='utf-8')}")
        return urllib.request.urlopen(request, timeout=10)


@contextmanager
def head(folder: Path, *, secure: bool = True) -> Iterator[Head]:
    """Start a head and wait until its node is there; end it and everything it started with the
    block.
    """
    python = without_checkout(folder / "python")
    token = new_secret(folder / "token", "the token") if secure else None
    temporary, tag = Path(tempfile.mkdtemp(prefix="")), os.urandom(8).hex()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHONPATH"))}
    environment |= node_settings(token, runs_jobs=True)
    environment |= {
        TAG: tag,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "TMPDIR": str(temporary),
    }
    with (
        ExitStack() as after,
        block(*PORTS, list(SERVICES)) as ports,
        (folder / "head.log").open("wb") as log,
    ):
        command = [
            python,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--num-cpus=8",
            "--include-dashboard=true",
            "--node-ip-address=127.0.0.1",
            *(f"--{name}={ports[name]}" for name in SERVICES),
            f"--temp-dir={temporary}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--object-store-memory={256 * 2**20}",
        ]
        process = subprocess.Popen(
            command, cwd="/", env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        after.callback(shutil.rmtree, temporary, ignore_errors=True)
        after.callback(lambda: eventually(lambda: not tagged(tag), "the head's processes end", 30))
        after.callback(process.wait, 60)
        after.callback(process.terminate)
        started = Head(f"http://127.0.0.1:{ports['dashboard-port']}", token, python, tag)
        eventually(
            lambda: (
                started.status("/api/v0/nodes") == 200 and b"ALIVE" in started.read("/api/v0/nodes")
            ),
            "a head",
            90,
            0.3,
        )
        yield started


def without_checkout(folder: Path) -> Path:
    """A Python that finds what is installed beside us, but no editable installation of this
    checkout.
    """
    venv.create(folder, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    (Path(site) / "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n", encoding="utf-8"
    )
    python = folder / "bin" / "python"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [python, "-c", "import ray, rayloop"],
        cwd="/",
        env=bare,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'rayloop'" in found.stderr, found.stderr
    return python


def checkout(folder: Path) -> Path:
    """A copy of the code, without the shipped data."""
    for package in ("rayloop", "recipes", "tests"):
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=shutil.ignore_patterns("__pycache__", "pages", "tiny"),
        )
    return folder


def free_ports(count: int) -> list[int]:
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def cluster_command(*arguments: object, cwd: Path, tag: str) -> subprocess.Popen[str]:
    """``python -m rayloop ...`` in ``cwd``, without a token of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        TAG: tag,
        "PYTHONPATH": str(cwd),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "rayloop", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
