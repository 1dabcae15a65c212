"""``bench multi_turn``: what long episodes with large screenshots cost beside engine and
environment, which are simulated.

Real are the driver, the environment actors (rendering included), the rollout actors and the reward
actors. Bytes are counted where they arrive, at the rollout actors; ``ratio`` is those bytes over
the bytes of the distinct images.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import machine
from rayloop.config.settings import load
from rayloop.launch.ray_variables import private_cluster
from rayloop.recipes.arc_vision import __file__ as recipe
from rayloop.run.config import RunConfig

MODEL = Path(recipe).parent / "tiny"
"""Its tokenizer and template are used, and its way to cut images."""
WARM_UP_STEPS = 1
"""Steps that are left out at the beginning."""
GROUP_SIZE = 8
OBJECT_STORE_BYTES = 6 << 30
"""Bytes of the object store: the payloads of two steps of 64 episodes, each with 15 screenshots,
and what is on its way.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--episodes", type=int, default=64, help=f"at once, in groups of {GROUP_SIZE}"
    )
    parser.add_argument(
        "--turns", type=int, default=15, help="of an episode, with a screenshot each"
    )
    parser.add_argument("--size", type=int, default=1_000_000, help="bytes of a screenshot")
    parser.add_argument("--steps", type=int, default=2, help="that are measured")
    parser.add_argument("--engines", type=int, default=2, help="simulated engines")
    parser.add_argument("--environments", type=int, default=2, help="environment actors")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="that an engine takes for a turn"
    )
    parser.set_defaults(run=_multi_turn)


def _multi_turn(arguments: argparse.Namespace) -> int:
    with private_cluster() as temporary, tempfile.TemporaryDirectory(dir=temporary) as folder:
        from rayloop.cluster.session import start  # imports ray, which reads the environment

        start(
            folder,
            store=OBJECT_STORE_BYTES,
            num_cpus=4 + arguments.engines + arguments.environments,
        )
        found = _measured(_config(arguments, Path(temporary)), Path(temporary))
    shape = {
        name: getattr(arguments, name)
        for name in ("episodes", "turns", "size", "engines", "environments")
    }
    least = arguments.turns * arguments.seconds
    print(json.dumps({**shape, **found, "engine_s": round(least, 2), "machine": machine()}))
    return 0


def _measured(config: RunConfig, folder: Path) -> dict[str, Any]:
    import ray

    from benchmarks.screens import ScreensActor
    from rayloop.actors.handles import create, submit
    from rayloop.cluster.services import ACTOR_COROUTINES

    run = folder / config.name
    (run / "logs").mkdir(parents=True)
    driver = create(
        ScreensActor,
        {"num_cpus": 0, "max_concurrency": ACTOR_COROUTINES},
        config,
        str(run),
        "never",
    )
    try:
        found: dict[str, Any] = ray.get(
            submit(driver, ScreensActor.measure, WARM_UP_STEPS), timeout=1200
        )
    finally:
        ray.shutdown()
    return found


def _config(arguments: argparse.Namespace, folder: Path) -> RunConfig:
    rows = [{"id": f"task-{n}", "prompt": f"{n}"} for n in range(4096)]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    config = {
        "name": "multi_turn",
        "output": folder.as_posix(),
        "steps": WARM_UP_STEPS + arguments.steps,
        "model": {"path": str(MODEL)},
        "data": {"train": str(folder / "rows.jsonl")},
        "algorithm": {
            "group_size": GROUP_SIZE,
            "groups_per_step": arguments.episodes // GROUP_SIZE,
            "filtering": {"filters": []},
        },
        "environment": {
            "actors": arguments.environments,
            "episode": {
                "environment": {
                    "use": "benchmarks.screens:Desktop",
                    "with": {"size": arguments.size},
                },
                "max_turns": arguments.turns,
                "max_images": arguments.turns,
                "max_tokens": 200_000,
            },
        },
        "rollout": {
            "actors": arguments.engines,
            "engine": {
                "use": "benchmarks.screens:WaitingEngine",
                "with": {"seconds": arguments.seconds},
            },
        },
        "reward": {"source": {"use": "benchmarks.step:DigitShare"}},
        "keep_rollouts": 0,
        "weight_sync": {"logprob_check": "stop"},
    }
    path = folder / "multi_turn.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return load(path, (), RunConfig)
