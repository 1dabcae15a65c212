"""A cluster on a real Slurm: found without an address, trained on, a node lost, stopped by time
limits, continued, cancelled.
"""

from __future__ import annotations

import json
import os
import re
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

from rayloop.launch.rendezvous import Head, Rendezvous
from rayloop.launch.slurm import SCRIPTS, nodes
from tests.deploy.slurm.lab import Lab, lab, why_not
from tests.support.runs import ROOT, eventually, settings

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
NAME = "lab"
STORE = "--object-store-memory=100000000"
SLOW = {"reset": {f"train-{number}": "hang" for number in range(24)}, "hang": 1.0}
"""An environment whose episodes take a second."""


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
        """What ``python -m rayloop slurm`` prints. Raises AssertionError when it fails."""
        command = [
            sys.executable,
            "-m",
            "rayloop",
            "slurm",
            str(arguments[0]),
            "--site",
            self.folder / "site.yaml",
        ]
        return self.lab.slurm(*map(str, [*command, *arguments[1:]]), cwd=ROOT)

    def sbatch(self, *arguments: object) -> str:
        """Submit by hand; returns the job's id."""
        output = self.folder / "logs" / "by-hand-%j.out"
        return self.lab.slurm(
            "sbatch", "--parsable", f"--output={output}", *map(str, arguments), cwd=ROOT
        )

    def state(self, job: str) -> str:
        """What Slurm says about a job."""
        return self.lab.slurm("scontrol", "-o", "show", "job", job)

    def restarts(self, job: str) -> int:
        """How often Slurm has started the job again."""
        [number] = re.findall(r"Restarts=(\d+)", self.state(job))
        return int(number)

    def head(self, count: int) -> Head:
        """The published head, once so many nodes are in the dashboard."""
        head: Head = self.wait(self.place.head, "a head", 240)
        self.wait(lambda: len(alive(head)) >= count, f"{count} nodes", 240)
        return head

    def wait(self, condition: Callable[[], Any], what: str, seconds: float) -> Any:
        """The first true value. Raises AssertionError, with what the jobs printed."""
        try:
            return eventually(condition, what, seconds, 0.5)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{self.lab.slurm('squeue', '-a', '-t', 'all')}\n{self.text()}"
            ) from None

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
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        file = self.folder / name / f"{kind}.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self, name: str) -> list[int]:
        return [record["step"] for record in self.records(name, "metrics")]

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records(name, "events") if record["event"] == event]

    def nodes(self, job: str) -> list[str]:
        """Where the elements of a job run."""
        return sorted(
            self.lab.slurm("squeue", "-h", "-j", job, "-t", "running", "-o", "%N").split()
        )

    def minutes(self, job: str) -> int:
        """How long a job has run, rounded up."""
        *hours, minutes, _ = map(
            int, self.lab.slurm("squeue", "-h", "-j", job, "-o", "%M").split(":")
        )
        assert hours == [], "too slow"
        return minutes + 1

    def limit(self, job: str, minutes: int) -> None:
        self.lab.slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def text(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text(encoding='utf-8')[-3000:]}"
            for log in sorted((self.folder / "logs").glob("*.out"))
        )

    def nothing_left_behind(self) -> None:
        """No process and no shared memory on the nodes, no temporary folder, no rendezvous."""
        eventually(lambda: not self.lab.processes(), f"processes end: {self.lab.processes()}", 15)
        for name, shared in self.lab.shared_memory().items():
            assert shared == [], name
        assert os.listdir(self.lab.environment["TMPDIR"]) == []
        assert not self.place.folder.exists()


def alive(head: Head) -> list[dict[str, Any]]:
    try:
        return [node for node in nodes(head) if node["state"] == "ALIVE"]
    except OSError:
        return []


@pytest.fixture
def site(tmp_path: Path, digits_model: Path) -> Iterator[Site]:
    if problem := why_not():
        pytest.skip(problem)
    node = [STORE]
    content = {
        "cluster": NAME,
        "rendezvous": str(tmp_path / "rendezvous"),
        "logs": str(tmp_path / "logs"),
        "head": {
            "partition": "cpu",
            "cpus": 1,
            "node": [*node, "--grace=30"],
            "sbatch": ["--signal=B:USR1@110"],
        },
        "worker": {"partition": "gpu", "cpus": 2, "count": 2, "gres": "gpu:2", "node": node},
    }
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    with lab() as started, tempfile.TemporaryDirectory(prefix="") as temporary:
        started.environment["TMPDIR"] = temporary
        yield Site(started, tmp_path, digits_model)


def test_a_dead_node_is_replaced_and_the_run_outlives_its_heads_time_limit(site: Site) -> None:
    head_job, workers = re.findall(r"(?:head|worker): job (\d+)", site.cluster("up"))
    environment = f"--export=ALL,RAYLOOP_RENDEZVOUS={site.place.folder.parent},RAYLOOP_PYTHON={sys.executable}"
    config = site.config("limited", steps=48, environment__episode__environment__with=SLOW)
    asked = ("--partition=cpu", "--cpus-per-task=1", "--time=20", "--signal=B:USR1@60", environment)
    job = site.sbatch(*asked, SCRIPTS / "train.sbatch", NAME, config)

    head = site.head(4)  # head, two workers and the driver's, which has no CPU to offer
    offers = [node["resources_total"] for node in alive(head)]
    assert [(offer["CPU"], offer["GPU"]) for offer in offers if "CPU" in offer] == [(2, 2)] * 2
    assert Path(str(head.token)).stat().st_mode & 0o777 == 0o600
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{head.dashboard}/api/v0/nodes", timeout=10)
    assert site.cluster("status").count("ALIVE") == 4

    site.wait(lambda: len(site.steps("limited")) > 2, "three steps", 420)
    # On a busy machine Slurm itself may start a job twice, before it runs.
    restarts = site.restarts(job)
    busy = site.nodes(workers)
    [victim] = [
        node
        for node, process in site.lab.processes()
        if "".join(process.cmdline()).startswith("ray::PolicyRank")
    ]
    cut = site.lab.cut(victim)
    [lost] = site.wait(
        lambda: site.events("limited", "node_lost"), "the run notices that a node is gone", 120
    )
    assert victim in lost["name"], lost
    assert lost["roles"]["policy"] == 1
    at = site.steps("limited")[-1]
    print(f"a silent node: noticed after {lost['time'] - cut:.1f} s")
    expected = sorted({"gpu1", "gpu2", "gpu3"} - {victim})
    assert victim in busy
    site.wait(lambda: site.nodes(workers) == expected, "Slurm gives the worker another node", 240)
    site.wait(lambda: site.steps("limited")[-1] > at + 2, "the same run goes on", 240)
    [first, *_] = [
        record["time"]
        for record in site.records("limited", "metrics")
        if record["time"] > lost["time"]
    ]
    print(f"the next step after {first - cut:.1f} s")
    assert site.restarts(job) == restarts

    site.limit(
        head_job, minutes=site.minutes(head_job) + 1
    )  # one to two minutes from now, so that the signal is due
    site.wait(
        lambda: "Restarts=1" in site.state(head_job), "the time limit's signal, and a requeue", 150
    )
    site.limit(head_job, minutes=20)
    site.completed(job, 600)
    assert site.steps("limited") == list(range(1, 49)), "every step once, none lost"
    assert len(site.events("limited", "preempted")) == 1, "it was saved before its head left"
    assert site.restarts(job) == restarts, "it followed the head"

    site.cluster("down")
    site.nothing_left_behind()


@pytest.mark.timeout(1200)
def test_a_fixed_size_job_trains_on_two_nodes_and_is_requeued_after_it_has_saved(
    site: Site,
) -> None:
    """``ray symmetric-run``: no rendezvous, no jobs beside it.

    Home is a folder of the test's: the token lies there.
    """
    home = site.folder / "home"
    home.mkdir()
    (site.folder / "logs").mkdir()
    values = {
        "HOME": home,
        "RAYLOOP_PYTHON": sys.executable,
        "RAY_TMPDIR": site.lab.environment["TMPDIR"],
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": STORE.partition("=")[2],
    }
    environment = ",".join(["ALL", *(f"{name}={value}" for name, value in values.items())])
    asked = (
        "--partition=gpu",
        "--nodes=2",
        "--cpus-per-task=2",
        "--time=20",
        f"--export={environment}",
    )
    config = site.config("fixed", steps=10, environment__episode__environment__with=SLOW)
    job = site.sbatch(*asked, SCRIPTS / "fixed_size.sbatch", config)

    site.wait(lambda: len(site.steps("fixed")) > 2, "three steps", 420)
    actors = [
        name
        for name, process in site.lab.processes()
        if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::")
    ]
    assert len(set(actors)) == 2, actors
    assert (home / ".rayloop" / "fixed_size" / "token").stat().st_mode & 0o077 == 0, (
        "only its owner reads the token"
    )
    site.lab.slurm("scancel", "--batch", "--signal=USR1", job)  # as Slurm does near the time limit
    site.wait(lambda: "Restarts=1" in site.state(job), "a requeue", 150)
    assert len(site.events("fixed", "preempted")) == 1, "it was saved"
    assert len(site.steps("fixed")) < 10
    site.completed(job, 600)
    assert site.steps("fixed") == list(range(1, 11)), "every step once, none lost"
    eventually(lambda: not site.lab.processes(), f"processes end: {site.lab.processes()}", 15)
