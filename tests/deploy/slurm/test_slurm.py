"""A cluster on a real Slurm: found without an address, trained on, stopped by the time limit, continued, and cancelled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from cluster.rendezvous import Head, Rendezvous
from cluster.slurm import SCRIPTS, nodes
from tests.deploy.slurm.lab import Lab, lab, why_not
from tests.support.runs import ROOT, eventually, settings

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]
NAME = "lab"
STORE = "--object-store-memory=100000000"


@dataclass(frozen=True)
class Site:
    """A running lab, the site's file, and where its jobs and runs leave what they write."""

    lab: Lab
    folder: Path
    model: Path

    @property
    def place(self) -> Rendezvous:
        return Rendezvous(self.folder / "rendezvous", NAME)

    def cluster(self, *arguments: object) -> str:
        """What ``python -m cluster slurm`` prints. Raises AssertionError when it fails."""
        command = [sys.executable, "-m", "cluster", "slurm", str(arguments[0]), "--site", self.folder / "site.yaml"]
        return self.lab.slurm(*map(str, [*command, *arguments[1:]]), cwd=ROOT)

    def sbatch(self, *arguments: object) -> str:
        """Submit by hand; returns the job's id."""
        output = self.folder / "logs" / "by-hand-%j.out"
        return self.lab.slurm("sbatch", "--parsable", f"--output={output}", *map(str, arguments), cwd=ROOT)

    def state(self, job: str) -> str:
        """The job's state and, with ``Restarts=``, how often Slurm has started it again."""
        return self.lab.slurm("scontrol", "-o", "show", "job", job)

    def head(self, count: int) -> Head:
        """The published head, once so many nodes are in the dashboard."""
        head: Head = self.wait(self.place.head, "a head", 60)
        self.wait(lambda: len(alive(head)) >= count, f"{count} nodes", 60)
        return head

    def wait(self, condition: Callable[[], Any], what: str, seconds: float) -> Any:
        """The first true value. Raises AssertionError, with what the jobs printed."""
        try:
            return eventually(condition, what, seconds, 0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.lab.slurm('squeue', '-a', '-t', 'all')}\n{self.text()}") from None

    def completed(self, job: str, seconds: float) -> str:
        """Wait for the end of a job; returns its record. Raises AssertionError when it fails."""

        def record() -> str:
            found = self.state(job)
            if any(f"JobState={state} " in found for state in ("FAILED", "TIMEOUT", "CANCELLED")):
                raise AssertionError(f"{found}\n{self.text()}")
            return found if "JobState=COMPLETED" in found else ""

        return str(self.wait(record, f"the end of job {job}", seconds))

    def config(self, name: str, **changes: Any) -> Path:
        """A run that needs both workers: four CPUs, of which a worker has two."""
        config = settings(self.folder, self.model, name=name, rollout__actors=2, **changes)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def steps(self, name: str) -> list[int]:
        return [json.loads(line)["step"] for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def text(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted((self.folder / "logs").glob("*.out")))

    def nothing_left_behind(self, temporary: set[str]) -> None:
        """No process and no shared memory on the nodes, no temporary folder, no rendezvous."""
        eventually(lambda: not self.lab.processes(), f"processes end: {self.lab.processes()}", 15)
        for name, shared in self.lab.shared_memory().items():
            assert shared == [], name
        assert set(os.listdir(tempfile.gettempdir())) & folders() <= temporary
        assert not self.place.folder.exists()


def folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("rayloop-")}


def alive(head: Head) -> list[dict[str, Any]]:
    try:
        return [node for node in nodes(head) if node["state"] == "ALIVE"]
    except OSError:
        return []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, digits_model: Path) -> Iterator[Site]:
    if problem := why_not():
        pytest.skip(problem)
    folder = tmp_path_factory.mktemp("site")
    node = [STORE]
    content = {
        "cluster": NAME, "rendezvous": str(folder / "rendezvous"), "logs": str(folder / "logs"),
        "head": {"partition": "cpu", "cpus": 1, "node": node},
        "worker": {"partition": "gpu", "cpus": 2, "count": 2, "gres": "gpu:2", "node": node},
        "train": {"partition": "cpu", "cpus": 1},
    }  # fmt: skip
    (folder / "site.yaml").write_text(yaml.safe_dump(content))
    with lab() as started:
        yield Site(started, folder, digits_model)


def test_separate_jobs_find_each_other_train_and_end(site: Site) -> None:
    before = folders()
    submitted = site.cluster("up", site.config("separate"))
    train = submitted.partition("train: job ")[2].split()[0]
    head = site.head(4)  # head, two workers and the driver's, which has no CPU to offer
    offers = [node["resources_total"] for node in alive(head)]
    assert [(offer["CPU"], offer["GPU"]) for offer in offers if "CPU" in offer] == [(2, 2)] * 2
    assert Path(str(head.token)).stat().st_mode & 0o777 == 0o600
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{head.dashboard}/api/v0/nodes", timeout=10)
    assert "ALIVE" in site.cluster("status")

    site.completed(train, 120)
    assert site.steps("separate") == [1, 2, 3]

    limited = site.config("limited", steps=30, environment__episode__environment__with=slow(site))
    job = site.sbatch("--partition=cpu", "--cpus-per-task=1", "--time=1", "--signal=B:USR1@10",
                      f"--export=ALL,RAYLOOP_RENDEZVOUS={site.folder}/rendezvous,RAYLOOP_PYTHON={sys.executable}",
                      SCRIPTS / "train.sbatch", NAME, limited)  # fmt: skip
    record = site.completed(job, 200)
    assert "Restarts=0" not in record, record
    assert site.steps("limited") == list(range(1, 31)), "every step once, none lost"

    site.cluster("down")
    site.nothing_left_behind(before)


def slow(site: Site) -> dict[str, Any]:
    tasks = [json.loads(line)["id"] for line in (site.folder / "train.jsonl").read_text().splitlines()]
    return {"reset": dict.fromkeys(tasks, "hang"), "hang": 1.0}


def test_one_allocation_trains_and_is_cancelled(site: Site) -> None:
    before = folders()
    submitted = site.cluster("up", "--together", site.config("together", steps=1000))
    job = submitted.partition("cluster: job ")[2].split()[0]
    site.wait(lambda: (site.folder / "together" / "metrics.jsonl").exists(), "a step", 90)
    assert len(alive(site.head(3))) == 3
    assert "JobState=RUNNING" in site.state(job)
    site.cluster("down")
    site.nothing_left_behind(before)


def test_scripts_are_sound() -> None:
    for script in SCRIPTS.glob("*.sbatch"):
        subprocess.run(["bash", "-n", script], check=True)
