"""A cluster of Slurm jobs from the scripts in deploy/slurm.

It has the settings of a site, and the jobs that follow from them.
"""

import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.launch.rendezvous import ROOT, Head, Rendezvous
from rayloop.launch.slurm_job import Queued, active

SITE = (Path(__file__).with_name("slurm_scripts") / "site.yaml").resolve()
SCRIPTS = SITE.parent
"""The folder deploy/slurm; the files in ``slurm_scripts`` are links to its files.

An installed wheel has the files in ``slurm_scripts``.
"""
CANCEL_TIMEOUT_S = 120.0
"""Seconds that cancelled jobs may take to end: Slurm's KillWait, and the site's epilog."""


class JobSettings(SettingsModel):
    """The resources of one kind of job. None: the site's default."""

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
        """The options of sbatch."""
        values = {
            "partition": self.partition,
            "time": self.time,
            "cpus-per-task": self.cpus,
            "mem": self.mem,
            "gres": self.gres,
        }
        options = [f"--{name}={value}" for name, value in values.items() if value is not None]
        return [*options, *self.sbatch]


class NodeSettings(JobSettings):
    """A node's job."""

    node: tuple[str, ...] = ()
    """Further options of ``python -m rayloop node``, for example --resource=rollout=1."""


class WorkerSettings(NodeSettings):
    """The jobs of the workers."""

    count: int = Field(1, ge=1)
    """Nodes."""


class SiteSettings(SettingsModel):
    """A cluster on one site: ``deploy/slurm/site.yaml``."""

    cluster: str = Field("rayloop", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """The name by which its nodes find each other."""
    rendezvous: str = ROOT
    """A folder that all nodes see."""
    logs: str = "runs/slurm"
    """Folder of the jobs' outputs."""
    sbatch: tuple[str, ...] = ()
    """Options of every job, for example --account=vision."""
    setup: str | None = None
    """A shell script that each job reads first, on a path that all nodes see.

    For example with ``module load`` or ``source venv/bin/activate``.
    """
    container: str | None = Field(None, pattern="^[^,]+$")
    """Words before the container's ``python``, without commas (sbatch).

    For example apptainer exec --nv /shared/rayloop.sif.
    """
    interface: str | None = None
    """The network interface that nodes listen on, such as ib0.

    Set it where Slurm's addresses belong to a slow network.
    """
    head: NodeSettings = NodeSettings()
    worker: WorkerSettings = WorkerSettings()
    train: JobSettings = JobSettings()

    @property
    def place(self) -> Rendezvous:
        """The cluster's rendezvous folder."""
        return Rendezvous(Path(self.rendezvous), self.cluster)


@dataclass(frozen=True)
class Job:
    """One call of sbatch. Every job but the head's waits until that one has begun."""

    role: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]

    def command(self, head: str) -> list[str]:
        """The call of sbatch; ``head`` is the id of the head's job."""
        dependency = [] if self.role == "head" else [f"--dependency=after:{head}"]
        return ["sbatch", "--parsable", *dependency, *self.options, *self.arguments]


def plan(site: SiteSettings, training: list[str]) -> list[Job]:
    """The jobs of a cluster, the head first.

    ``training``: the arguments of ``train``; empty: no training.
    """
    variables = {
        "RENDEZVOUS": Path(site.rendezvous).expanduser().absolute(),
        "PYTHON": sys.executable if site.container is None else "python",
        "SETUP": None if site.setup is None else Path(site.setup).expanduser().absolute(),
        "CONTAINER": site.container,
        "INTERFACE": site.interface,
    }
    assignments = [
        f"RAYLOOP_{name}={value}" for name, value in variables.items() if value is not None
    ]
    export = ",".join(["ALL", *assignments])

    def job(role: str, script: str, resources: list[str], arguments: list[str]) -> Job:
        name = f"{site.cluster}-{role}"
        # Workers are an array: %A is its number, %a that of the element.
        number = "%A_%a" if role == "worker" else "%j"
        output = Path(site.logs).absolute() / f"{name}-{number}.out"
        common = [f"--job-name={name}", f"--output={output}", f"--export={export}", *site.sbatch]
        return Job(role, (*common, *resources), (str(SCRIPTS / script), site.cluster, *arguments))

    array = [*site.worker.options(), f"--array=1-{site.worker.count}"]
    jobs = [
        job("head", "ray_head.sbatch", site.head.options(), list(site.head.node)),
        job("worker", "ray_worker.sbatch", array, list(site.worker.node)),
    ]
    if training:
        jobs.append(job("train", "train.sbatch", site.train.options(), training))
    return jobs


def nodes(head: Head) -> list[dict[str, Any]]:
    """The nodes that the head's dashboard lists. Raises OSError when it does not answer."""
    request = urllib.request.Request(f"{head.dashboard}/api/v0/nodes?limit=10000&detail=1")
    if head.token is not None:
        token = Path(head.token).read_text(encoding="utf-8")
        request.add_header("Authorization", f"Bearer {token}")
    # The empty ProxyHandler turns off the proxies of the environment, which do not reach nodes.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        entries: list[dict[str, Any]] = json.load(answer)["data"]["result"]["result"]
    return entries


def still_active(numbers: list[str], seconds: float) -> list[Queued]:
    """Wait for the end of jobs; returns the jobs that have not ended within ``seconds``."""
    deadline = time.monotonic() + seconds
    jobs = active(numbers)
    while jobs and time.monotonic() < deadline:
        time.sleep(0.5)
        jobs = active(numbers)
    return jobs
