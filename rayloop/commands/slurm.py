"""``slurm render|up|status|down``: a cluster of Slurm jobs from the scripts in deploy/slurm, and
its end.
"""

import argparse
import shlex
from pathlib import Path

from rayloop.config.settings import load
from rayloop.core.failures import ConfigError
from rayloop.launch.slurm import CANCEL, SITE, Job, SiteSettings, nodes, plan, still_active
from rayloop.launch.slurm_job import SlurmError, active, slurm
from rayloop.run.config import read
from rayloop.run.preflight import preflight


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the four actions and their options."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, run, help in (
        ("render", _render, "print what `up` would submit, as a shell script"),
        ("up", _up, "submit head and workers, and training with a CONFIG"),
        ("status", _status, "jobs, head and nodes"),
        ("down", _down, "stop runs, cancel the cluster's jobs and remove its rendezvous folder"),
    ):
        action = actions.add_parser(name, help=help)
        action.add_argument(
            "--site",
            type=Path,
            default=SITE,
            help="YAML file of the site (default: deploy/slurm/site.yaml)",
        )
        action.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="key=value",
            help="of the site, such as worker.count=4",
        )
        if run in (_render, _up):
            action.add_argument(
                "config", nargs="?", type=Path, help="YAML file of a run to train on the cluster"
            )
            action.add_argument(
                "overrides", nargs="*", default=[], metavar="key=value", help="overrides of the run"
            )
        if run is _down:
            action.add_argument(
                "--grace",
                type=float,
                default=150.0,
                metavar="SECONDS",
                help="for runs to save (150)",
            )
        action.set_defaults(run=run)


def _planned(a: argparse.Namespace) -> tuple[SiteSettings, list[Job]]:
    site = load(a.site, a.set, SiteSettings)
    if a.config is not None:
        preflight(read(a.config, a.overrides))  # refused here, not after hours in the queue
    return site, plan(site, [str(a.config), *a.overrides] if a.config else [])


def _render(a: argparse.Namespace) -> int:
    site, jobs = _planned(a)
    print(f"mkdir -p {shlex.quote(str(Path(site.logs).absolute()))}")
    for job in jobs:
        text = shlex.join(job.command("HEAD")).replace("after:HEAD", '"after:$head"')
        print(f"head=$({text})" if job.role == "head" else text)
    return 0


def _up(a: argparse.Namespace) -> int:
    site, jobs = _planned(a)
    place = site.place
    found = place.head()
    if found is not None and found.stale() is None:
        raise ConfigError(
            f"the cluster {site.cluster} is up, at {found.address}. `slurm down` ends it;"
            " cluster=NAME is another"
        )
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
    place = load(a.site, a.set, SiteSettings).place
    jobs = active(place.jobs())
    print("\n".join(["jobs:", *(f"  {job.text}" for job in jobs)]) if jobs else "jobs: none")
    head = place.head()
    if head is None or (why := head.stale()) is not None:
        print("head: none" if head is None else f"head: stale, {why}")
        return 1
    print(f"head: {head.address} on {head.node}, dashboard {head.dashboard}")
    print(
        f"token file: {head.token}"
        if head.token
        else "token file: none, everybody who reaches the ports may run code"
    )
    print("nodes:")
    for node in nodes(head):
        total = {
            name: amount
            for name, amount in node["resources_total"].items()
            if ":" not in name and "memory" not in name
        }
        print(f"  {node['state']} {node['node_ip']} {node['node_name']} {total}")
    return 0


def _down(a: argparse.Namespace) -> int:
    """Stop runs first, by SIGINT to the batch step alone, so that Ray stays until they have saved;
    then cancel all jobs.
    """
    site = load(a.site, a.set, SiteSettings)
    place = site.place
    saving = [job.number for job in active(place.jobs(programs=True)) if job.state == "RUNNING"]
    if saving:
        print(f"waiting up to {a.grace:g} s for {', '.join(saving)} to save", flush=True)
        slurm("scancel", "--batch", "--signal=INT", *saving)
        still_active(saving, a.grace)
    if jobs := active(place.jobs()):
        slurm("scancel", *(job.number for job in jobs))
    if jobs := still_active(place.jobs(), CANCEL):
        raise SlurmError(
            f"cancelled jobs have not ended within {CANCEL:g} s:"
            f" {', '.join(job.text for job in jobs)}. Run down again"
        )
    place.remove()
    print(f"{site.cluster}: no jobs, {place.folder} removed")
    return 0
