"""``bench step`` and ``bench compare``: a GRPO step of any text model through the real actors, and
a peer's beside it.

The task is a toy, so that only speed is measured: short sums as prompts, the share of digits as
reward, and answers that all have the full length. Model, prompts, lengths, learning rate and
threads are the same on both sides.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, get_args

import yaml

from benchmarks.measure import PeakMemory, alternately, machine
from rayloop.config.model import Dtype
from rayloop.config.settings import load
from rayloop.core.failures import ConfigError
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.engines.shape import ModelSource
from rayloop.launch.ray_variables import private_cluster
from rayloop.run.config import RunConfig
from rayloop.run.preflight import prepare as prepare_run
from rayloop.run.records.jsonl import JsonLines

PEER = Path(__file__).parent / "peers" / "trl_step.py"
"""Runs in the environment that has TRL."""
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The prompt's text and nothing else, as TRL passes a prompt that is no conversation; base models
have no template.
"""
PARTS = ("step_s_median", "gen_s_median", "train_s_median", "cpu_s_mean")
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vllm": {
        "kind": "vllm",
        "extra": {"enforce_eager": True, "kv_cache_memory_bytes": 2**30, "max_model_len": 8192},
    },
}
"""Settings of ``rollout.engine`` that are not in the shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one measured step is: ``prompts * group`` answers of ``completion`` tokens each."""

    model: Path
    prompts: int
    group: int
    completion: int
    steps: int
    threads: int
    lr: float
    dtype: str

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Shape:
        given = vars(arguments)
        return cls(**{field.name: given[field.name] for field in fields(cls)})


class DigitShare:
    """A toy reward: the share of characters that are digits."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> float:
        text = context.texts[-1]
        return sum(character.isdigit() for character in text) / max(1, len(text))


def add_step(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--engine", choices=ENGINES, default="transformers", help="that generates")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="for example policy.engine.micro_batch_tokens=1",
    )
    parser.set_defaults(run=_step)


def add_compare(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--rounds", type=int, default=3, help="how often each of them runs")
    parser.add_argument(
        "--peer-python",
        required=True,
        metavar="PYTHON",
        help="interpreter of an environment with TRL",
    )
    parser.set_defaults(run=_compare)


def add_shape(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    """What a step is; ``model``: whether one must be named."""
    parser.add_argument(
        "--model", type=Path, required=model, metavar="DIR", help="folder of a text model"
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--completion", type=int, default=64, help="tokens of every answer")
    parser.add_argument(
        "--steps", type=int, default=7, help="the first one warms up and is left out of the medians"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch in generation and in training"
    )
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of both sides")
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), default="float32", help="that both sides compute in"
    )


def _step(arguments: argparse.Namespace) -> int:
    with private_cluster() as temporary:
        print(
            json.dumps(step(Shape.of(arguments), arguments.engine, arguments.overrides, temporary))
        )
    return 0


def step(shape: Shape, engine: str, overrides: Sequence[str], temporary: str) -> dict[str, Any]:
    """Train ``shape.steps`` steps in a private cluster whose files are in ``temporary``; returns
    what was measured.
    """
    from rayloop.cluster.stages.train import train  # imports ray

    began = time.time()
    folder = Path(temporary) / "bench"
    folder.mkdir()
    config = load(prepare(shape, engine, folder), overrides, RunConfig)
    with PeakMemory() as memory:
        train(prepare_run(config), None, temporary)
    return _result(shape, folder / config.name, began, memory)


def write_rows(path: Path, shape: Shape) -> None:
    """A prompt {id, prompt} for every group; equal shapes, equal files."""
    generator = random.Random(0)
    sums = (
        f"{generator.randint(0, 99)} + {generator.randint(0, 99)} = "
        for _ in range(shape.prompts * shape.steps)
    )
    path.write_text(
        "".join(
            json.dumps({"id": f"sum-{i}", "prompt": text}) + "\n" for i, text in enumerate(sums)
        ),
        encoding="utf-8",
    )


def _plain_prompts(model: Path, target: Path) -> None:
    """A folder like ``model`` (its files are linked) whose chat template is ``TEMPLATE``.

    Raises ConfigError.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: no config.json there; expected a folder in Hugging Face layout"
        )
    target.mkdir()
    for file in model.iterdir():
        if not file.name.startswith("chat_template"):
            (target / file.name).symlink_to(file.resolve())
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def prepare(shape: Shape, engine: str, folder: Path) -> Path:
    """Writes rows, model folder and configuration of the run into ``folder``; returns the
    configuration's file.

    It has the defaults, but for the shape, filters (none: every group is trained on) and the
    folder. Raises ConfigError.
    """
    write_rows(folder / "rows.jsonl", shape)
    _plain_prompts(shape.model, folder / "model")
    length, batch = shape.completion, shape.prompts * shape.group
    own = (
        {"threads": shape.threads, "max_sequences": batch}
        if engine == "transformers"
        else {"max_sequences": batch}
    )
    values = {
        "name": "run",
        "output": str(folder),
        "steps": shape.steps,
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl")},
        "rollout": {
            "engine": {**ENGINES[engine], **own, "dtype": shape.dtype},
            "sampling": {"max_tokens": length, "min_tokens": length},
        },
        "reward": {"source": {"use": "benchmarks.step:DigitShare"}},
        "policy": {
            "engine": {"threads": shape.threads, "dtype": shape.dtype},
            "optimizer": {"lr": shape.lr},
        },
        "algorithm": {
            "group_size": shape.group,
            "groups_per_step": shape.prompts,
            "filtering": {"filters": []},
        },
        "checkpoint": {"every": shape.steps},
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def _result(shape: Shape, run: Path, began: float, memory: PeakMemory) -> dict[str, Any]:
    """The fields of the peer's line, from the records of a finished run.

    A step lasts from one record of the run to the next: everything that is done for it is in that
    time. Generation is the time in which the trainer waits for scored answers; training is the
    rest.
    """
    records = list(JsonLines(run / "metrics.jsonl"))
    begun = max(
        event["time"] for event in JsonLines(run / "events.jsonl") if event.get("step") == 0
    )
    times = [begun, *(record["time"] for record in records)]
    steps = [after - before for before, after in pairwise(times)]
    generation = [record["timing_s/gen"] for record in records]
    training = [whole - part for whole, part in zip(steps, generation, strict=True)]
    tokens = [round(record["rollout/tokens"]) for record in records]
    warm = slice(1 if len(steps) > 1 else 0, None)
    return {
        "tool": "rayloop",
        "versions": {name: version(name) for name in ("rayloop", "ray", "transformers", "torch")},
        **asdict(shape),
        "model": str(shape.model),
        "params_m": round(_parameters(shape.model) / 1e6, 3),
        "setup_s": round(begun - began, 2),
        "wall_s": round(times[-1] - begun, 2),
        "step_s_median": round(median(steps[warm]), 3),
        "step_s": [round(seconds, 3) for seconds in steps],
        "warm_steps": times[warm],
        "gen_s_median": round(median(generation[warm]), 3),
        "gen_s": [round(seconds, 3) for seconds in generation],
        "train_s_median": round(median(training[warm]), 3),
        "completion_tokens": tokens,
        "gen_tok_per_s": round(sum(tokens[warm]) / sum(generation[warm]), 1),
        "samples_per_s": round(shape.prompts * shape.group / median(steps[warm]), 2),
        "reward": [record["reward/mean"] for record in records],
        "peak_rss_mb": round(memory.rss),
        "peak_pss_mb": round(memory.pss),
    }


def _parameters(model: Path) -> int:
    """Parameters in the folder's safetensors files; a tied head is not among them."""
    return ModelSource(str(model)).shape.parameters


def _compare(arguments: argparse.Namespace) -> int:
    """Run the peer and ours in turn, ``rounds`` times. Prints the ratios of their median times."""
    shape = Shape.of(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        rows = Path(temporary) / "rows.jsonl"
        write_rows(rows, shape)
        options = [
            item for name, value in asdict(shape).items() for item in (f"--{name}", str(value))
        ]
        commands = {
            "peer": [arguments.peer_python, str(PEER), "--rows", str(rows), *options],
            "ours": [sys.executable, "-m", "benchmarks", "step", *options],
        }
        rounds = alternately(commands, arguments.rounds, _describe)
    whole = {
        side: {name: median(r[side][name] for r in rounds) for name in PARTS} for side in commands
    }
    ratios = {name: round(whole["ours"][name] / whole["peer"][name], 3) for name in PARTS}
    print(f"median of {len(rounds)}: {_describe(whole)}")
    print(json.dumps({"ratio": ratios, "machine": machine(), "rounds": rounds}))
    return 0


def _describe(sides: Mapping[str, Mapping[str, Any]]) -> str:
    ours, peer = sides["ours"], sides["peer"]
    return ", ".join(
        f"{name.removesuffix('_s_median')} {ours[name]:.3f} / {peer[name]:.3f} s ="
        f" {ours[name] / peer[name]:.3f}"
        for name in PARTS
    )
