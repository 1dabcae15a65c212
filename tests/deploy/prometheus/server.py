"""A real Prometheus beside a live run: ``python -m tests.deploy.prometheus.server install``
installs Debian's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.debian import install
from tests.support.heads import free_ports
from tests.support.runs import ROOT, eventually

ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
FASTER = 60
"""What the durations of the rules are divided by: a minute becomes a second."""


def faster(text: str) -> str:
    """The rules with every duration divided by ``FASTER``: ``for``, the windows in brackets, and
    the limit of the progress age.
    """
    seconds = {"s": 1, "m": 60, "h": 3600}

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{max(1, int(found[2]) * seconds[found[3]] // FASTER)}s"

    text = re.sub(r"(for: |\[)(\d+)([smh])", shorter, text)
    return re.sub(
        r"(progress_age > )(\d+)", lambda found: f"{found[1]}{int(found[2]) // FASTER}", text
    )


@dataclass(frozen=True)
class Prometheus:
    """A running server. Its rules are the shipped ones, but ``faster``."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = httpx.get(f"{self.url}/api/v1/alerts", timeout=10).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def prometheus(folder: Path, targets: Path) -> Iterator[Prometheus]:
    """A server on loopback that scrapes every second what the file ``targets`` names."""
    (folder / "alerts.yaml").write_text(
        faster(ALERTS.read_text(encoding="utf-8")), encoding="utf-8"
    )
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [
            {
                "job_name": "ray",
                "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "2s"}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    [port] = free_ports(1)
    where = f"127.0.0.1:{port}"
    options = (
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={where}",
        "--log.level=warn",
    )
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", *options], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        made = Prometheus(f"http://{where}")
        eventually(
            lambda: _ready(made.url), f"Prometheus answers, see {folder}/prometheus.log", 30, 0.2
        )
        yield made
    finally:
        process.terminate()
        process.wait(20)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    assert sys.argv[1:] == ["install"]
    install("test-alerts", ("prometheus", "promtool"), ("prometheus",))
