"""``bench scale``: the real driver with simulated engines, environments and trainer, whose times
come from a file of latencies.

``cost`` gives the driver's CPU time per trajectory by the number of episodes in flight. ``engines``
gives it, and that of a weight sync, by the number of rollout engines, and how many of them one
driver feeds at most. ``async`` compares bounded staleness with synchronous steps; both have a bound
that follows from the latencies alone: engines that are never idle, and steps that last as long as
the slowest of their trajectories.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.load import Load
from benchmarks.measure import machine
from rayloop.launch.ray_variables import private_cluster

MODEL = Path(__file__).parents[1] / "recipes/arc_vision/loose"
"""What the driver reads of a model's folder is in this one; nothing loads its weights."""

LATENCIES = Path(__file__).with_name("latencies.json")
"""Seconds per episode, mean 1, long-tailed: 4,096 draws of a log-normal distribution (sigma 0.8)
cut at 6 times the mean.
"""
IN_FLIGHT = (1, 8, 64, 256, 1024, 2048)
ENGINE_COUNTS = (8, 64, 512)
SEQUENCES_PER_ENGINE = 16
"""Sequences that an engine of ``engines`` decodes at once."""
STEP_TRAJECTORIES = 512
"""Trajectories of a step of ``async``, as many as all its engines decode at once."""
WARM_UP_STEPS = 2
"""Steps that are left out at the beginning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("cost", "engines", "async"),
        help="CPU by episodes or engines, or asynchronous steps",
    )
    parser.add_argument(
        "--latencies", type=Path, default=LATENCIES, metavar="FILE", help="JSON list of seconds"
    )
    parser.add_argument(
        "--in-flight", type=int, nargs="*", default=IN_FLIGHT, help="cost: episodes in flight"
    )
    parser.add_argument("--rate", type=float, default=40.0, help="cost: trajectories per second")
    parser.add_argument(
        "--trajectories", type=int, default=1024, help="cost: that are measured, at least"
    )
    parser.add_argument(
        "--engines",
        type=int,
        nargs="*",
        default=ENGINE_COUNTS,
        help="engines: numbers of rollout engines",
    )
    parser.add_argument(
        "--episode", type=float, default=60.0, help="engines: mean seconds of an episode"
    )
    parser.add_argument(
        "--latency", type=float, default=6.0, help="async: mean seconds of an episode"
    )
    parser.add_argument("--staleness", type=int, default=4, help="async: the bound")
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="async: that are measured, and twice as many asynchronous ones",
    )
    parser.set_defaults(run=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    latencies = json.loads(arguments.latencies.read_text(encoding="utf-8"))
    measure = {"cost": _cost, "engines": _engines, "async": _async}[arguments.what]
    with private_cluster() as temporary:
        from rayloop.cluster.session import session  # imports ray, which reads the environment

        with session({}, None, temporary, Path(temporary)):
            found = measure(arguments, latencies)
    print(json.dumps({"what": arguments.what, **found, "machine": machine()}))
    return 0


def _cost(arguments: argparse.Namespace, latencies: Sequence[float]) -> dict[str, Any]:
    """The driver's cost with engines that take every request at once, a quarter of the groups
    filtered.
    """
    found = []
    for count in arguments.in_flight:
        group = min(8, max(1, count // 4))
        groups = max(1, count // 4 // group)
        steps = WARM_UP_STEPS + max(4, -(-arguments.trajectories // (group * groups)))
        load = Load(
            4,
            count,
            group,
            groups,
            min(3, count - 1),
            steps,
            count / arguments.rate,
            0.0,
            0.25 if group > 1 else 0.0,
        )
        found.append({"in_flight": count, **_run(load, latencies)})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return {"cost": found}


def _engines(arguments: argparse.Namespace, latencies: Sequence[float]) -> dict[str, Any]:
    """Engines of ``SEQUENCES_PER_ENGINE`` sequences, all taken; a step trains as many episodes as
    are in flight.

    ``engines_at_most``: with so many engines that are never idle the driver's one core is full, at
    this CPU time of a trajectory.
    """
    found = []
    for count in arguments.engines:
        flight = count * SEQUENCES_PER_ENGINE
        load = Load(
            count,
            SEQUENCES_PER_ENGINE,
            8,
            flight // 8,
            1,
            WARM_UP_STEPS + 2,
            arguments.episode,
            1.0,
            0.0,
        )
        run = _run(load, latencies)
        full = 1000 * arguments.episode / (SEQUENCES_PER_ENGINE * run["cpu_ms_per_trajectory"])
        found.append({"engines": count, "in_flight": flight, **run, "engines_at_most": int(full)})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return {"episode_s": arguments.episode, "engines": found}


def _async(arguments: argparse.Namespace, latencies: Sequence[float]) -> dict[str, Any]:
    """64 engines that decode 8 sequences each, steps of 64 groups of 8, nothing filtered."""
    found: dict[str, Any] = {}
    for name, staleness, steps in (
        ("synchronous", 0, arguments.steps),
        ("asynchronous", arguments.staleness, 2 * arguments.steps),
    ):
        load = Load(64, 8, 8, 64, staleness, WARM_UP_STEPS + steps, arguments.latency, 0.1, 0.0)
        found[name] = _run(load, latencies)
        print(json.dumps(found[name]), file=sys.stderr, flush=True)
    drawn = random.Random(0)
    slowest = (
        mean(max(drawn.choices(latencies, k=STEP_TRAJECTORIES)) for _ in range(2_000))
        / mean(latencies)
        * arguments.latency
    )
    bounds = {
        "synchronous": STEP_TRAJECTORIES / (slowest + 0.1),
        "asynchronous": STEP_TRAJECTORIES / arguments.latency,
    }
    speeds = {name: found[name]["trained_per_s"] for name in bounds}
    gain, bound = (
        speeds["asynchronous"] / speeds["synchronous"],
        bounds["asynchronous"] / bounds["synchronous"],
    )
    return {
        **found,
        "bound_per_s": {name: round(value, 2) for name, value in bounds.items()},
        "gain": round(gain, 3),
        "bound_of_gain": round(bound, 3),
        "share_of_bound": {
            **{n: round(speeds[n] / bounds[n], 3) for n in bounds},
            "gain": round(gain / bound, 3),
        },
    }


def _run(load: Load, latencies: Sequence[float]) -> dict[str, Any]:
    import ray

    from benchmarks.simulated import SimulatedActor, simulated_driver
    from rayloop.actors.handles import submit

    with tempfile.TemporaryDirectory() as folder:
        driver = simulated_driver(_config(load, Path(folder)), folder, load, latencies)
        found: dict[str, Any] = ray.get(
            submit(driver, SimulatedActor.measure, WARM_UP_STEPS), timeout=3600
        )
        ray.kill(driver)
    return found


def _config(load: Load, folder: Path) -> Path:
    rows = [{"id": f"task-{n}", "prompt": f"{n}"} for n in range(4096)]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    batches = 8 if load.uniform else 2
    config = {
        "name": "scale",
        "output": folder.as_posix(),
        "steps": load.steps,
        "model": {"path": str(MODEL)},
        "data": {"train": str(folder / "rows.jsonl")},
        "algorithm": {
            "group_size": load.group,
            "groups_per_step": load.groups,
            "staleness": {"max_staleness": load.staleness},
            "advantage": {"kind": "raw" if load.group == 1 else "grpo"},
            "filtering": {
                "max_generation_batches": batches,
                **({} if load.uniform else {"filters": []}),
            },
        },
        "reward": {"source": {"use": "benchmarks.step:DigitShare"}},
        "rollout": {"actors": load.engines},
        "weight_sync": {"logprob_check": "stop"},
        "keep_rollouts": 0,
    }
    path = folder / "scale.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path
