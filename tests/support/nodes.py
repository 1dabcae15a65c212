"""Nodes of ``python -m rayloop node`` as processes of this machine, without Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rayloop.launch.rendezvous import Head, Rendezvous
from rayloop.launch.slurm import nodes
from tests.support.runs import ROOT, TAG, eventually, tagged

STORE = "--object-store-memory=80000000"


@dataclass
class Nodes:
    """A cluster on this machine, node by node."""

    folder: Path
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def place(self) -> Rendezvous:
        return Rendezvous(self.folder, "here")

    def start(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "rayloop",
            "node",
            role,
            "--cluster=here",
            f"--rendezvous={self.folder}",
            STORE,
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM"))}
        environment |= {TAG: self.tag, "TMPDIR": str(self.temporary)}
        environment |= dict.fromkeys(
            ("http_proxy", "HTTP_PROXY", "grpc_proxy"), "http://127.0.0.1:9"
        )  # nobody is there
        with (self.folder / f"{role}-{len(self.started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        self.started.append(process)
        return process

    @property
    def temporary(self) -> Path:
        return self.folder / "t"

    def until(self, condition: Any, what: str, seconds: float = 150) -> Any:
        try:
            return eventually(condition, what, seconds, 0.2)
        except AssertionError as error:
            logs = "\n".join(
                f"== {log.name}\n{log.read_text(encoding='utf-8')}"
                for log in sorted(self.folder.glob("*.log"))
            )
            raise AssertionError(f"{error}\n{logs}") from None

    def head(self, former: Head | None = None) -> Head:
        def published() -> Head | None:
            found = self.place.head()
            return None if found == former else found

        head: Head = self.until(published, "a head", 150)
        return head

    def alive(self, head: Head) -> int:
        try:
            return sum(node["state"] == "ALIVE" for node in nodes(head))
        except OSError:
            return 0


@contextmanager
def here() -> Iterator[Nodes]:
    """A cluster that ends with the block, with all its processes."""
    with tempfile.TemporaryDirectory(prefix="n") as folder:
        made = Nodes(Path(folder))
        made.temporary.mkdir()
        try:
            yield made
        finally:
            for process in made.started:
                process.kill()
                process.wait()
            for left in tagged(made.tag):
                with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
                    left.kill()
