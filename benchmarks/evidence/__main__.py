"""Evidence that training works, with seeds, controls and rivals.

    python -m benchmarks.evidence NAME [--only SEED] [--arm ARM] [--note TEXT] [--out FILE]
    [key=value ...]
    python -m benchmarks.evidence alarms RUN...
    python -m benchmarks.evidence peer --python PYTHON [--only SEED]

Every run is put into NAME.json beside this file with the hash of its configuration, and ``--note``,
the other load of the machine; one that is there with the same hash, and its folder below
runs/evidence, is taken as it is. All intervals are 95 % bootstrap intervals over tasks.
``staleness`` simulates a run on a virtual clock, ``filtering`` compares filters, ``sight`` blinds a
policy, ``peer`` trains with TRL. ``alarms`` prints of each run and collapse alarm the worst mean of
five steps, and the limit that warns by default.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.evidence import filtering, menu, peer, sight, staleness
from benchmarks.evidence.experiments import EXPERIMENTS, SUPERVISED, Experiment
from benchmarks.evidence.runs import (
    Record,
    configured,
    differences,
    measured,
    pooled,
    start_of,
    write,
)
from benchmarks.evidence.tables import draw, markdown
from rayloop.core.failures import RayloopError
from rayloop.grpo.collapse import Collapse, CollapseSettings, Floor
from rayloop.run.folder import RunFolder

SIMULATIONS: dict[str, Callable[[], None]] = {
    "staleness": staleness.main,
    "filtering": filtering.main,
    "menu": menu.main,
    "sight": sight.main,
}


def main(argv: list[str] | None = None) -> int:
    """Run one experiment, print its tables, and return the exit code: 1 when a promised gain was
    missed or a run failed.
    """
    chosen = _parser().parse_args(argv)
    try:
        if chosen.name in SIMULATIONS:
            SIMULATIONS[chosen.name]()
        elif chosen.name == "peer":
            return peer.main(chosen)
        elif chosen.name == "alarms":
            for run in chosen.runs:
                print(json.dumps({"run": str(run), **worst(run)}))
        else:
            return _experiment(chosen)
    except RayloopError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence", description="Evidence that training works."
    )
    names = parser.add_subparsers(required=True, metavar="NAME", dest="name")
    for name, experiment in EXPERIMENTS.items():
        one = names.add_parser(
            name,
            help=experiment.about,
            epilog=f"first: {experiment.needs}" if experiment.needs else None,
        )
        one.add_argument("--only", type=int, metavar="SEED", help="this seed alone")
        one.add_argument("--arm", choices=_arms(experiment), help="this arm alone")
        one.add_argument("--note", default="", help="the other load of the machine meanwhile")
        one.add_argument(
            "--out",
            type=Path,
            default=Path(__file__).with_name(f"{name}.json"),
            help="JSON file to write or continue",
        )
        one.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="of the configuration"
        )
    for name in SIMULATIONS:
        names.add_parser(name, help=f"see benchmarks/evidence/{name}.py")
    peer.add_arguments(names.add_parser("peer", help="TRL beside the experiment reasoning"))
    names.add_parser("alarms", help="collapse alarms").add_argument(
        "runs", nargs="+", type=Path, metavar="RUN"
    )
    return parser


def _arms(experiment: Experiment) -> list[str]:
    return [*experiment.arms, *([SUPERVISED] if experiment.supervised else [])]


def _experiment(chosen: argparse.Namespace) -> int:
    experiment, found = EXPERIMENTS[chosen.name], Record()
    if chosen.out.exists():
        found = json.loads(chosen.out.read_text(encoding="utf-8"))
    if (
        not isinstance(found, dict) or found.get("experiment") != chosen.name
    ):  # nothing, or made by an earlier version
        found = {"experiment": chosen.name, "start": start_of(experiment, chosen.name), "runs": {}}
    for seed in experiment.seeds if chosen.only is None else [chosen.only]:
        runs = found["runs"].setdefault(str(seed), {})
        for arm in _arms(experiment) if chosen.arm is None else [chosen.arm]:
            if arm == SUPERVISED and seed != experiment.seeds[0]:
                continue
            if not _usable(runs.get(arm), configured(experiment, arm, chosen.overrides)[2]):
                runs[arm] = {
                    "note": chosen.note,
                    **measured(experiment, chosen.name, arm, seed, chosen.overrides),
                }
            found["compared"] = differences(experiment, found["runs"])
            if experiment.pooled:
                found["pooled"] = pooled(experiment, found["runs"])
            write(chosen.out, found)
    draw(experiment, found)
    print("\n".join(markdown(experiment, found)))
    missed = [
        f"seed {seed}"
        for seed, by_arm in found["runs"].items()
        if not all(_kept(experiment, run) for run in by_arm.values())
    ]
    if missed:
        print(
            f"not as promised (gain of at least {dict(experiment.promised)} in"
            f" {experiment.seconds:g} s): {', '.join(missed)}"
        )
    return 1 if missed else 0


def _usable(run: Record | None, config: str) -> bool:
    """Whether this run was made with the configuration, and its folder is here."""
    return run is not None and run["config"] == config and Path(run["folder"]).is_dir()


def _kept(experiment: Experiment, run: Record) -> bool:
    """Whether a run has the promised gains, the sampled one with an interval above 0, in the
    promised seconds.
    """
    if not experiment.promised:
        return True
    rose = all(
        run["gain"][kind]["reward"][0] >= least for kind, least in experiment.promised.items()
    )
    return bool(
        rose and run["gain"]["sampled"]["reward"][1] > 0 and run["wall_s"] <= experiment.seconds
    )


def worst(run: Path) -> dict[str, dict[str, Any]]:
    """Alarm -> ``worst`` and ``warn``, from the fifth step on.

    Raises ConfigError for a folder without a run.
    """
    collapse, found = Collapse(CollapseSettings()), dict[str, dict[str, Any]]()
    for record in RunFolder.begun(run).metrics:
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        for name, (value, limit, _) in collapse.step(numbers).items():
            least = min if isinstance(limit, Floor) else max
            before = found[name]["worst"] if name in found else value
            found[name] = {"worst": round(least(value, before), 3), "warn": limit.warn}
    return found


if __name__ == "__main__":
    sys.exit(main())
