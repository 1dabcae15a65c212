"""``python -m benchmarks.evidence peer``: TRL's GRPOTrainer on the rows, rewards and sizes of the
experiment ``reasoning``.

Both curves, of held-out sampled reward over steps and over training seconds (without evaluations),
go into reasoning.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
from itertools import accumulate
from pathlib import Path

from benchmarks.evidence.experiments import EXPERIMENTS
from benchmarks.evidence.runs import RUNS, Record, only, rounded, sources, write
from benchmarks.measure import BenchFailed, machine
from rayloop.config.settings import load
from rayloop.measure.controls import SAMPLED
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items

FILE = Path(__file__).with_name("reasoning.json")
LEARNER = Path(__file__).parents[1] / "peers" / "trl_learn.py"
ARM = "single"
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Lets glibc keep freed memory, as rayloop's trainer does: without, a step of TRL took 207 s, of
which 40 % zeroed pages.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", required=True, metavar="PYTHON", help="interpreter of an environment with TRL"
    )
    parser.add_argument("--only", type=int, default=0, metavar="SEED", help="the seed (default: 0)")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument(
        "--log",
        type=Path,
        help="the output of a run that was stopped: record the evaluations that it printed",
    )
    parser.add_argument("--note", default="", help="the other load of the machine meanwhile")


def main(chosen: argparse.Namespace) -> int:
    """Run the peer once, record and print both curves. Raises BenchFailed when it fails."""
    experiment = EXPERIMENTS["reasoning"]
    config = load(experiment.config, list(experiment.common), RunConfig)
    theirs = _peer(chosen, config)
    found: Record = json.loads(FILE.read_text(encoding="utf-8"))
    record = {"note": chosen.note, "machine": machine(), **theirs}
    found.setdefault("peer", {})[str(chosen.only)] = record
    found.setdefault("curve", {})[str(chosen.only)] = curve(
        RunFolder.at(RUNS / "reasoning" / f"{ARM}-{chosen.only}")
    )
    write(FILE, found)
    print("\n".join(table(found)))
    return 0


def _peer(chosen: argparse.Namespace, config: RunConfig) -> Record:
    """The last line that the peer prints."""
    algorithm, evaluation = config.algorithm, config.evaluation
    shots = config.model_dump(by_alias=True)["data"]["reader"]["with"]["shots"]
    options = {
        "train": config.data.train,
        "eval": config.data.eval,
        "model": config.model.path,
        "prompts": algorithm.groups_per_step,
        "group": algorithm.group_size,
        "completion": config.rollout.sampling.max_tokens,
        "steps": chosen.steps or config.steps,
        "threads": 2,
        "seed": chosen.only,
        "every": evaluation.every,
        "samples": evaluation.samples,
        "micro": 16,
        "shots": shots,
        "lr": config.policy.optimizer.lr,
    }
    command = [
        chosen.python,
        str(LEARNER),
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
    ]
    print("+ " + " ".join(command), flush=True)
    if chosen.log:
        return _printed(chosen, options, chosen.log.read_text(encoding="utf-8", errors="replace"))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **KEPT}
    ) as run:
        assert run.stdout is not None
        lines = [line for line in run.stdout if print(line, end="", flush=True) is None]
    if run.returncode or not lines:
        raise BenchFailed(f"{' '.join(command)} ended with {run.returncode}; its output is above")
    found: Record = json.loads(lines[-1])
    return found


def _printed(chosen: argparse.Namespace, options: Record, output: str) -> Record:
    """What a run that was stopped had printed: an evaluation is ``STEP {...}``, a training step a
    line ``{...}``.
    """
    ask = [chosen.python, "-c", "from importlib.metadata import version; print(version('trl'))"]
    version = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    held_out = {
        step: ast.literal_eval(found)
        for step, found in re.findall(r"^(\d+) (\{.*\})$", output, re.MULTILINE)
    }
    steps = [ast.literal_eval(line) for line in re.findall(r"^\{'loss'.*\}$", output, re.MULTILINE)]
    logged = {
        name: [round(float(step[name]), 4) for step in steps]
        for name in ("reward", "entropy", "step_time")
    }
    shown = {
        name: str(value)
        for name, value in options.items()
        if name not in ("train", "eval", "model")
    }
    return {
        "tool": "trl",
        "trl": version,
        **shown,
        "stopped_after": len(steps),
        **logged,
        "held_out": held_out,
    }


def curve(run: RunFolder) -> Record:
    """Step of an evaluation -> means of the sampled reward by task, ``exact`` of all, and the
    seconds of training until then.
    """
    seconds = [
        0.0,
        *accumulate(
            float(m["timing_s/step"]) - float(m.get("timing_s/eval", 0.0)) for m in run.metrics
        ),
    ]
    found = {}
    for step, file in sorted(run.evaluations.files().items()):
        by = sources(only(read_items(file), SAMPLED))
        found[str(step)] = {
            **{task: scores["reward"][0] for task, scores in by.items()},
            "train_s": rounded(seconds[step]),
        }
    return found


def table(found: Record) -> list[str]:
    """Both curves of each seed."""
    lines = [
        "| seed | step | sampled reward, ours | TRL | training s, ours | TRL |",
        "|---|---|---|---|---|---|",
    ]
    for seed, peer in sorted(found["peer"].items()):
        ours = found["curve"][seed]
        for step in sorted({*ours} & {*peer["held_out"]}, key=int):
            a, b = ours[step], peer["held_out"][step]
            lines.append(
                f"| {seed} | {step} | {a['all']:.3f} | {b['all']:.3f} | {a['train_s']:.0f} |"
                f" {b['train_s']:.0f} |"
            )
    return lines
