"""``slurm render|up|status|down``: starts and ends a cluster of Slurm jobs.

The jobs' scripts are in deploy/slurm.
"""

import argparse
import shlex
from pathlib import Path

from rayloop.commands.arguments import add_overrides
from rayloop.config.settings import load
from rayloop.core.failures import ConfigError
from rayloop.launch.slurm import (
    CANCEL_TIMEOUT_S,
    SITE,
    Job,
    SiteSettings,
    nodes,
    plan,
    still_active,
)
from rayloop.launch.slurm_job import SlurmError, active, slurm
from rayloop.run.config import read
from rayloop.run.preflight import preflight, prepare


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
            add_overrides(action, "overrides of the run")
        if run is _down:
            action.add_argument(
                "--grace",
                type=float,
                default=150.0,
                metavar="SECONDS",
                help="for runs to save (150)",
            )
        action.set_defaults(run=run)


def _plan(arguments: argparse.Namespace) -> tuple[SiteSettings, list[Job]]:
    site = load(arguments.site, arguments.set, SiteSettings)
    if arguments.config is None:
        return site, plan(site, [])
    # A bad configuration is refused here, not after hours in the queue.
    preflight(prepare(read(arguments.config, arguments.overrides)))
    return site, plan(site, [str(arguments.config), *arguments.overrides])


def _render(arguments: argparse.Namespace) -> int:
    site, jobs = _plan(arguments)
    print(f"mkdir -p {shlex.quote(str(Path(site.logs).absolute()))}")
    for job in jobs:
        text = shlex.join(job.command("HEAD")).replace("after:HEAD", '"after:$head"')
        print(f"head=$({text})" if job.role == "head" else text)
    return 0


def _up(arguments: argparse.Namespace) -> int:
    site, jobs = _plan(arguments)
    place = site.place
    head = place.head()
    if head is not None and head.stale() is None:
        raise ConfigError(
            f"the cluster {site.cluster} is up, at {head.address}. `slurm down` ends it;"
            " cluster=NAME is another"
        )
    Path(site.logs).mkdir(parents=True, exist_ok=True)
    head_job = ""
    for job in jobs:
        number = slurm(*job.command(head_job)).strip().partition(";")[0]
        place.register(number)
        head_job = head_job or number
        print(f"{job.role}: job {number}")
    print(f"outputs: {Path(site.logs).absolute()}\nfolder:  {place.folder}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    place = load(arguments.site, arguments.set, SiteSettings).place
    jobs = active(place.jobs())
    print("jobs:" if jobs else "jobs: none")
    for job in jobs:
        print(f"  {job.text}")
    head = place.head()
    if head is None:
        print("head: none")
        return 1
    stale_reason = head.stale()
    if stale_reason is not None:
        print(f"head: stale, {stale_reason}")
        return 1
    print(f"head: {head.address} on {head.node}, dashboard {head.dashboard}")
    token = head.token or "none, everybody who reaches the ports may run code"
    print(f"token file: {token}")
    print("nodes:")
    for node in nodes(head):
        resources = {
            name: amount
            for name, amount in node["resources_total"].items()
            if ":" not in name and "memory" not in name
        }
        print(f"  {node['state']} {node['node_ip']} {node['node_name']} {resources}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    """Stop the runs first, then cancel all jobs.

    SIGINT goes only to the batch step, so that Ray stays until the runs have saved.
    """
    site = load(arguments.site, arguments.set, SiteSettings)
    place = site.place
    saving = [job.number for job in active(place.jobs(programs=True)) if job.state == "RUNNING"]
    if saving:
        print(f"waiting up to {arguments.grace:g} s for {', '.join(saving)} to save", flush=True)
        slurm("scancel", "--batch", "--signal=INT", *saving)
        still_active(saving, arguments.grace)
    jobs = active(place.jobs())
    if jobs:
        slurm("scancel", *(job.number for job in jobs))
    remaining = still_active(place.jobs(), CANCEL_TIMEOUT_S)
    if remaining:
        raise SlurmError(
            f"cancelled jobs have not ended within {CANCEL_TIMEOUT_S:g} s:"
            f" {', '.join(job.text for job in remaining)}. Run down again"
        )
    place.remove()
    print(f"{site.cluster}: no jobs, {place.folder} removed")
    return 0
