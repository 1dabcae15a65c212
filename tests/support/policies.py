"""The policy's endpoint for tests: ``python -m rayloop policy serve`` as a process beside a real
run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.runs import ROOT, TAG, Run, eventually

START = 300.0


@dataclass
class Endpoint:
    """``folder`` has what it announced, its key and what it printed."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def url(self) -> str:
        url: str = json.loads((self.folder / "policy.json").read_text(encoding="utf-8"))["url"]
        return url

    @property
    def key(self) -> str:
        return (self.folder / "policy.key").read_text(encoding="utf-8").strip()

    @property
    def text(self) -> str:
        return (self.folder / "policy.log").read_text(errors="replace", encoding="utf-8")

    def http(self, **options: Any) -> httpx.Client:
        """With the key; paths begin behind ``/v1``."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(
            base_url=self.url, headers=headers, trust_env=False, timeout=120, **options
        )

    def ready(self, deadline: float = START) -> None:
        """Wait until it can answer."""

        def check() -> bool:
            assert self.process.poll() is None, self.text
            with self.http() as http:
                return http.get(self.url.removesuffix("/v1") + "/readyz").status_code == 200

        eventually(check, lambda: f"the endpoint is ready\n{self.text}", deadline, 0.2)


def command(*arguments: object, tag: str = "") -> list[str]:
    return [sys.executable, "-m", "rayloop", "policy", "serve", *map(str, arguments)]


@contextmanager
def endpoint(made: Run, *options: str, folder: Path | None = None) -> Iterator[Endpoint]:
    """Serve the live run on a free port. What it says lies in the run's folder."""
    where = folder or made.folder
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {
        TAG: made.tag,
        "TMPDIR": str(made.temporary),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    arguments = command("--run", made.folder, "--announce", where / "policy.json", *options)
    with (where / "policy.log").open("wb") as log:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    found = Endpoint(process, where)
    try:
        eventually(
            lambda: (where / "policy.json").exists() or process.poll() is not None,
            "an endpoint",
            START,
            0.1,
        )
        assert process.poll() is None, found.text
        yield found
        if process.poll() is None:
            process.terminate()
        assert process.wait(60) == 0, found.text
    finally:
        if process.poll() is None:
            process.kill()
