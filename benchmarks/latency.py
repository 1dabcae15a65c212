"""``bench latency``: how busy engines are while environments are slow, beside a loop that steps all
environments together.

Real are driver, environment, rollout and reward actors, rendering included; the screens wait as
long as GUIs do, and the engine has slots that each take as long for a turn. What the latencies
allow: each environment is at the engine for ``turn`` seconds and away for a step's, so of E
environments E * turn / (turn + mean step) are there on average, and no more than there are slots.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.measure import machine
from rayloop.config.settings import load
from rayloop.launch.ray_variables import private_cluster
from rayloop.recipes.arc_vision import __file__ as recipe
from rayloop.run.config import RunConfig

MODEL = Path(recipe).parent / "tiny"
GROUP, STEP = 8, 64
"""Members of a group, and trajectories of an asynchronous step."""
TARGET_REWARD = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--environments", type=int, default=256, help="at once")
    parser.add_argument("--turns", type=int, default=6, help="of an episode")
    parser.add_argument(
        "--slots", type=int, default=96, help="turns that the engine samples at once"
    )
    parser.add_argument(
        "--turn", type=float, default=1.0, help="seconds that the engine takes for one"
    )
    parser.add_argument(
        "--steps", type=int, default=6, help=f"of {STEP} trajectories that are measured"
    )
    parser.add_argument("--actors", type=int, default=2, help="environment actors")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="times that both loops are measured, one after the other",
    )
    parser.set_defaults(run=_latency)


def _latency(arguments: argparse.Namespace) -> int:
    found: dict[str, list[float]] = {"free": [], "barrier": []}
    with private_cluster() as temporary, tempfile.TemporaryDirectory(dir=temporary) as folder:
        from benchmarks.gui import latencies  # imports ray, which reads the environment
        from rayloop.cluster.session import start

        step = mean(latencies(0, 200_000))
        there = arguments.environments * arguments.turn / (arguments.turn + step)
        allowed = min(float(arguments.slots), there)
        start(folder, num_cpus=4 + arguments.actors)
        for number in range(arguments.rounds):
            for loop in found:
                one = _measured(arguments, Path(temporary), loop, number)
                share = one["busy"] / one["seconds"] / allowed
                found[loop].append(round(share, 3))
                print(
                    f"{loop}: {share:.3f} of what is allowed, {one['turns'] / one['seconds']:.1f}"
                    " turns/s",
                    flush=True,
                )
        import ray

        ray.shutdown()
    shape = {
        name: getattr(arguments, name)
        for name in ("environments", "turns", "slots", "turn", "actors")
    }
    found_steps = {
        "mean_step_s": round(step, 3),
        "allowed_slots": round(allowed, 1),
        "target": TARGET_REWARD,
    }
    print(json.dumps({**shape, **found_steps, "busy_of_allowed": found, "machine": machine()}))
    return 0


def _measured(
    arguments: argparse.Namespace, folder: Path, loop: str, number: int
) -> dict[str, float]:
    """Begun when the first episodes have ended, and environments are at different turns; a barrier
    keeps them together.
    """
    import ray

    from benchmarks.gui import GuiActor
    from rayloop.actors.handles import create, submit
    from rayloop.cluster.services import ACTOR_COROUTINES

    barrier = arguments.environments if loop == "barrier" else 0
    warm = 0 if barrier else -(-arguments.environments // STEP)
    config = _config(
        arguments, folder, f"{loop}-{number}", barrier, 1 if barrier else warm + arguments.steps
    )
    run = folder / config.name
    (run / "logs").mkdir(parents=True)
    driver = create(
        GuiActor, {"num_cpus": 0, "max_concurrency": ACTOR_COROUTINES}, config, str(run), "never"
    )
    try:
        found: dict[str, float] = ray.get(
            submit(driver, GuiActor.measure, warm, arguments.environments), timeout=900
        )
    finally:
        ray.kill(driver)
    return found


def _config(
    arguments: argparse.Namespace, folder: Path, name: str, barrier: int, steps: int
) -> RunConfig:
    rows = [{"id": f"task-{n}", "prompt": f"{n}"} for n in range(4096)]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    target = barrier or STEP
    ahead = (
        0 if barrier else -(-3 * arguments.environments // (2 * STEP))
    )  # groups that wait for room among those that play
    config: dict[str, Any] = {
        "name": name,
        "output": folder.as_posix(),
        "steps": steps,
        "model": {"path": str(MODEL)},
        "data": {"train": str(folder / "rows.jsonl")},
        "algorithm": {
            "group_size": GROUP,
            "groups_per_step": target // GROUP,
            "filtering": {"filters": []},
            "staleness": {"max_staleness": ahead},
        },
        "environment": {
            "actors": arguments.actors,
            "episode": {
                "environment": {"use": "benchmarks.gui:Gui", "with": {"turns": arguments.turns}},
                "max_turns": arguments.turns + 1,
                "max_tokens": 200_000,
            },
        },
        "rollout": {
            "engine": {
                "use": "benchmarks.gui:SlotEngine",
                "with": {"seconds": arguments.turn, "slots": arguments.slots, "barrier": barrier},
            },
        },
        "reward": {"source": {"use": "benchmarks.step:DigitShare"}},
        "keep_rollouts": 0,
        "weight_sync": {"logprob_check": "stop"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return load(path, (), RunConfig)
