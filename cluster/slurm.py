"""``slurm render|up|status|down``: a cluster of Slurm jobs from the scripts in deploy/slurm, and its end."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from cluster.node import ROOT
from cluster.rendezvous import Head, Rendezvous
from cluster.scheduler import Queued, SlurmError, active, slurm
from rayloop.core.config import Settings, load
from rayloop.core.failures import ConfigError

SCRIPTS = Path(__file__).parents[1] / "deploy" / "slurm"
SITE = SCRIPTS / "site.yaml"
CANCEL = 120.0
"""Seconds that cancelled jobs may take to end: Slurm's KillWait, and what the site's epilog does."""


class JobSettings(Settings):
    """What one kind of job asks Slurm for. None: the site's default."""

    partition: str | None = None
    time: str = "1-00:00:00"
    """The limit, as sbatch has it: days-hours:minutes:seconds."""
    cpus: int = Field(4, ge=1)
    mem: str | None = None
    gres: str | None = None
    """For example gpu:8."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, for example --constraint=a100."""

    def options(self) -> list[str]:
        asked = {"partition": self.partition, "time": self.time, "cpus-per-task": self.cpus, "mem": self.mem, "gres": self.gres}
        return [f"--{name}={value}" for name, value in asked.items() if value is not None] + list(self.sbatch)


class NodeSettings(JobSettings):
    node: tuple[str, ...] = ()
    """Further options of ``python -m cluster node``, for example --resource=rollout=1."""


class WorkerSettings(NodeSettings):
    count: int = Field(1, ge=1)
    """Nodes."""


class SiteSettings(Settings):
    """A cluster on one site: ``deploy/slurm/site.yaml``."""

    cluster: str = Field("rayloop", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """The name by which its nodes find each other."""
    rendezvous: str = ROOT
    """A folder that all nodes see."""
    logs: str = "runs/slurm"
    """Folder of the jobs' outputs."""
    sbatch: tuple[str, ...] = ()
    """Options of every job, for example --account=vision."""
    head: NodeSettings = NodeSettings()
    worker: WorkerSettings = WorkerSettings()
    train: JobSettings = JobSettings()

    @property
    def place(self) -> Rendezvous:
        return Rendezvous(Path(self.rendezvous), self.cluster)


@dataclass(frozen=True)
class Job:
    """One call of sbatch. ``after_head``: not before the head's job has begun."""

    role: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]
    after_head: bool = True

    def command(self, head: str) -> list[str]:
        dependency = [f"--dependency=after:{head}"] if self.after_head else []
        return ["sbatch", "--parsable", *dependency, *self.options, *self.arguments]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, run, help in (
        ("render", _render, "print what `up` would submit, as a shell script"),
        ("up", _up, "submit head and workers, and training with a CONFIG"),
        ("status", _status, "jobs, head and nodes"),
        ("down", _down, "stop runs, cancel the cluster's jobs and remove its rendezvous folder"),
    ):
        action = actions.add_parser(name, help=help)
        action.add_argument("--site", type=Path, default=SITE, help="YAML file of the site (default: deploy/slurm/site.yaml)")
        action.add_argument(
            "--set", action="append", default=[], metavar="key=value", help="of the site, for example worker.count=4"
        )
        if run in (_render, _up):
            action.add_argument("config", nargs="?", type=Path, help="YAML file of a run to train on the cluster")
            action.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="overrides of the run")
            action.add_argument("--together", action="store_true", help="one allocation for all, which ends with the training")
        if run is _down:
            action.add_argument("--grace", type=float, default=150.0, metavar="SECONDS", help="for runs to save (150)")
        action.set_defaults(command=run)


def plan(site: SiteSettings, training: list[str], *, together: bool) -> list[Job]:
    """The jobs of a cluster, the head first. ``training``: the arguments of ``train``; empty: no training."""
    export = f"ALL,RAYLOOP_RENDEZVOUS={Path(site.rendezvous).expanduser().absolute()},RAYLOOP_PYTHON={sys.executable}"

    def job(role: str, script: str, asked: list[str], arguments: list[str], after_head: bool = True) -> Job:
        name = f"{site.cluster}-{role}"
        output = Path(site.logs).absolute() / f"{name}-%{'A_%a' if role == 'worker' else 'j'}.out"
        common = [f"--job-name={name}", f"--output={output}", f"--export={export}", *site.sbatch]
        return Job(role, (*common, *asked), (str(SCRIPTS / script), site.cluster, *arguments), after_head)

    if together:
        export += f",RAYLOOP_HEAD_OPTIONS={' '.join(site.head.node)},RAYLOOP_WORKER_OPTIONS={' '.join(site.worker.node)}"
        parts = [*site.head.options(), ":", *site.sbatch, *site.worker.options(), f"--nodes={site.worker.count}"]
        return [job("cluster", "cluster.sbatch", parts, training, after_head=False)]
    array = [*site.worker.options(), f"--array=1-{site.worker.count}"]
    jobs = [
        job("head", "ray_head.sbatch", site.head.options(), list(site.head.node), after_head=False),
        job("worker", "ray_worker.sbatch", array, list(site.worker.node)),
    ]
    return jobs + ([job("train", "train.sbatch", site.train.options(), training)] if training else [])


def _planned(a: argparse.Namespace) -> tuple[SiteSettings, list[Job]]:
    site = load(a.site, a.set, SiteSettings)
    if a.together and a.config is None:
        raise ConfigError("--together needs the CONFIG of a run: the allocation ends with its training")
    if a.config is not None:
        from cluster.cli import read
        from cluster.preflight import preflight

        preflight(read(a.config, a.overrides))  # refused here, not after hours in the queue
    return site, plan(site, [str(a.config), *a.overrides] if a.config else [], together=a.together)


def _render(a: argparse.Namespace) -> int:
    site, jobs = _planned(a)
    print(f"mkdir -p {shlex.quote(str(Path(site.logs).absolute()))}")
    for job in jobs:
        text = shlex.join(job.command("HEAD")).replace("after:HEAD", '"after:$head"')
        print(text if job.after_head else f"head=$({text})")
    return 0


def _up(a: argparse.Namespace) -> int:
    site, jobs = _planned(a)
    place = site.place
    found = place.head()
    if found is not None and found.stale() is None:
        raise ConfigError(f"the cluster {site.cluster} is up, at {found.address}. `slurm down` ends it; cluster=NAME is another")
    Path(site.logs).mkdir(parents=True, exist_ok=True)
    head = ""
    for job in jobs:
        number = slurm(*job.command(head)).strip().partition(";")[0]
        place.register(number)
        head = head or number
        print(f"{job.role}: job {number}")
    print(f"outputs: {Path(site.logs).absolute()}\nfolder:  {place.folder}")
    return 0


def _status(a: argparse.Namespace) -> int:
    site = load(a.site, a.set, SiteSettings)
    place = site.place
    jobs = active(place.jobs())
    print("\n".join(["jobs:", *(f"  {job.text}" for job in jobs)]) if jobs else "jobs: none")
    head = place.head()
    if head is None or (why := head.stale()) is not None:
        print("head: none" if head is None else f"head: stale, {why}")
        return 1
    print(f"head: {head.address} on {head.node}, dashboard {head.dashboard}")
    print(f"token file: {head.token}" if head.token else "token file: none, everybody who reaches the ports may run code")
    print("nodes:")
    for node in nodes(head):
        total = {name: amount for name, amount in node["resources_total"].items() if ":" not in name and "memory" not in name}
        print(f"  {node['state']} {node['node_ip']} {node['node_name']} {total}")
    return 0


def nodes(head: Head) -> list[dict[str, Any]]:
    """The nodes that the head's dashboard lists. Raises OSError when it does not answer."""
    request = urllib.request.Request(f"{head.dashboard}/api/v0/nodes?limit=10000&detail=1")
    if head.token is not None:
        request.add_header("Authorization", f"Bearer {Path(head.token).read_text()}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=30) as answer:
        listed: list[dict[str, Any]] = json.load(answer)["data"]["result"]["result"]
    return listed


def _down(a: argparse.Namespace) -> int:
    """Runs are stopped first and may save; then all jobs are cancelled. SIGINT goes to the batch step alone: what ends a job
    at once, as Slurm does it with cgroups or without, may end Ray before the run has saved."""
    site = load(a.site, a.set, SiteSettings)
    place = site.place
    saving = [job.number for job in active(place.jobs(programs=True)) if job.state == "RUNNING"]
    if saving:
        print(f"waiting up to {a.grace:g} s for {', '.join(saving)} to save", flush=True)
        slurm("scancel", "--batch", "--signal=INT", *saving)
        _left(saving, a.grace)
    if jobs := active(place.jobs()):
        slurm("scancel", *(job.number for job in jobs))
    if jobs := _left(place.jobs(), CANCEL):
        raise SlurmError(
            f"cancelled jobs have not ended within {CANCEL:g} s: {', '.join(job.text for job in jobs)}. Run down again"
        )
    place.remove()
    print(f"{site.cluster}: no jobs, {place.folder} removed")
    return 0


def _left(numbers: list[str], seconds: float) -> list[Queued]:
    """Wait for the end of jobs; returns those that have not ended within ``seconds``."""
    deadline = time.monotonic() + seconds
    while (jobs := active(numbers)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return jobs
