"""One run of an experiment: training with its seconds, the evaluations on record, and comparisons
with other runs.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.evidence.experiments import SUPERVISED, Experiment
from benchmarks.measure import BenchFailed, machine
from benchmarks.processes import CHECK_EVERY_S, Tree
from rayloop.config.settings import load
from rayloop.measure.controls import RIGHT, SAMPLED, Item, gains, means, summarise
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items
from tools.makers.random_clicks import play

RUNS = Path("runs/evidence")
DECIMAL_PLACES = 4
"""Decimals that are kept."""
KINDS = {SAMPLED: "sampled", RIGHT: "greedy"}
Record = dict[str, Any]


def configured(
    experiment: Experiment, arm: str, overrides: Sequence[str]
) -> tuple[Path, list[str], str]:
    """Configuration file and overrides of an arm, and a hash of all their values but seed and
    place, and of the start weights.
    """
    if arm == SUPERVISED:
        assert experiment.supervised is not None
        return (
            experiment.supervised,
            [],
            hashlib.sha256(experiment.supervised.read_bytes()).hexdigest()[:16],
        )
    chosen = [*experiment.common, *experiment.arms[arm], *overrides]
    file = experiment.files.get(arm, experiment.config)
    config = load(file, chosen, RunConfig)
    digest = hashlib.sha256(config.model_dump_json(exclude={"seed", "name", "output"}).encode())
    for weights in sorted(Path(config.model.path).glob("*.safetensors")):
        digest.update(weights.read_bytes())
    return file, chosen, digest.hexdigest()[:16]


def timed(*arguments: object) -> Record:
    """Run ``python -m rayloop`` with these arguments: wall seconds, and CPU seconds of all
    processes. Raises BenchFailed.
    """
    command = [sys.executable, "-m", "rayloop", *map(str, arguments)]
    print("+ " + " ".join(command), flush=True)
    began = time.monotonic()
    run = subprocess.Popen(command)
    tree = Tree(run.pid)
    while run.poll() is None:
        tree.look()
        time.sleep(CHECK_EVERY_S)
    if run.returncode:
        raise BenchFailed(f"{' '.join(command)} ended with {run.returncode}; its output is above")
    return {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(tree.seconds)}


def measured(
    experiment: Experiment, name: str, arm: str, seed: int, overrides: Sequence[str]
) -> Record:
    """Train an arm with a seed, evaluate its checkpoint on the experiment's sets, and record both.

    Raises BenchFailed.
    """
    config, chosen, digest = configured(experiment, arm, overrides)
    folder = RUNS / name / f"{arm.replace(', ', '-').replace(' ', '_')}-{seed}"
    about = {
        "config": digest,
        "folder": str(folder),
        "machine": machine(),
        "overrides": list(overrides),
    }
    if arm == SUPERVISED:
        first = RunFolder.at(RUNS / name / f"{next(iter(experiment.arms))}-{seed}")
        seconds = sum(float(record["timing_s/step"]) for record in first.metrics)
        spent = timed("sft", config, f"output={folder}", f"seed={seed}", f"seconds={seconds:.1f}")
        return about | spent | evaluated(experiment, name, folder)
    spent = timed(
        "train", config, *chosen, f"output={folder.parent}", f"name={folder.name}", f"seed={seed}"
    )
    return (
        about
        | spent
        | recorded(experiment, RunFolder.at(folder))
        | evaluated(experiment, name, folder)
    )


def recorded(experiment: Experiment, run: RunFolder) -> Record:
    """The metrics of a run that the picture draws, each evaluation, and the gain from the
    first to the last one.

    ``trained_tokens`` are the sampled ones of the whole run, ``prompt_tokens`` the others of an
    episode, with its observations and images.
    """
    records = list(run.metrics)
    events = list(run.events)
    tokens = [int(record["rollout/tokens"]) for record in records]
    seconds = sorted(float(record["timing_s/step"]) for record in records)
    answers = {step: read_items(file) for step, file in run.evaluations.files().items()}
    first = min(answers)
    last = max(answers)
    held_out = {}
    for step, items in answers.items():
        result = summary(items, by_source=experiment.by_source)
        if step not in (first, last):
            # Between the ends, tables and pictures read no other score.
            result = {"arms": _shown(result["arms"], experiment.shown)}
        held_out[str(step)] = {"tokens": sum(tokens[:step]), **result}
    return {
        "steps": len(records),
        "trained_tokens": round(sum(record.get("actor/tokens", 0.0) for record in records)),
        "turns": round(fmean(record.get("rollout/turns/mean", 0.0) for record in records), 2),
        "prompt_tokens": round(fmean(record.get("prompt_length/mean", 0.0) for record in records)),
        "first_step_s": round(records[0]["time"] - events[0]["time"], 1),
        "median_step_s": round(seconds[len(seconds) // 2], 2),
        "training": {
            name: [round(record.get(name, 0.0), DECIMAL_PLACES) for record in records]
            for name in experiment.curves.values()
        },
        "held_out": held_out,
        "gain": gained(answers[last], answers[first]),
        "ledger": next(event["ledger"] for event in events if event["event"] == "finished"),
    }


def _shown(arms: Record, scores: Sequence[str]) -> Record:
    return {
        arm: {score: by_score[score] for score in scores if score in by_score}
        for arm, by_score in arms.items()
    }


def summary(items: Sequence[Item], *, by_source: bool = False) -> Record:
    """Means by arm with their 95 % intervals, what the right image gains over each control, and
    scores of the sampled answers by source.
    """
    result: Record = rounded(summarise(items, 0))
    del result["sources"]
    if by_source:
        result["by_source"] = {KINDS[SAMPLED]: sources(only(items, SAMPLED))}
    return result


def sources(items: Sequence[Item]) -> Record:
    """Score means of all items (``all``), and of those of each source."""
    names = ["all", *sorted({item.source for item in items})]
    return {
        name: rounded(means(item for item in items if name in ("all", item.source)))
        for name in names
    }


def gained(after: Iterable[Item], before: Iterable[Item]) -> Record:
    """Kind of answer -> score -> mean difference with its 95 % interval, paired by task."""
    new, old = list(after), list(before)
    found = {kind: rounded(gains(only(new, arm), only(old, arm))) for arm, kind in KINDS.items()}
    return {kind: by for kind, by in found.items() if by}


def only(items: Iterable[Item], arm: str) -> list[Item]:
    """The items of one arm."""
    return [item for item in items if item.arm == arm]


def rounded(value: Any) -> Any:
    """``value`` with its floats rounded to DECIMAL_PLACES, tuples as lists, as JSON has them."""
    match value:
        case float():
            return round(value, DECIMAL_PLACES)
        case dict():
            return {name: rounded(each) for name, each in value.items()}
        case tuple() | list():
            return [rounded(each) for each in value]
    return value


def write(file: Path, value: Record, levels: int = 3) -> None:
    """Write JSON with a line for each value below the outer ``levels``: of an experiment, a run."""
    file.write_text(_lines(value, levels) + "\n", encoding="utf-8")


def _lines(value: Any, levels: int) -> str:
    if levels == 0 or not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    entries = [f"{json.dumps(name)}:{_lines(each, levels - 1)}" for name, each in value.items()]
    return "{\n" + ",\n".join(entries) + "\n}"


def evaluated(experiment: Experiment, name: str, checkpoint: Path, label: str = "") -> Record:
    """Set -> summary of ``rayloop eval`` with this checkpoint, and its gain over the start weights.

    Empty without sets.
    """
    found = {}
    for key, rows in experiment.sets.items():
        folder = RUNS / name / "eval" / (label or checkpoint.name) / key
        asked = [
            "--checkpoint",
            checkpoint,
            "--data",
            rows.path,
            "--samples",
            rows.samples,
            "--out",
            folder,
        ]
        timed("eval", experiment.config, *asked, *(["--controls"] if rows.controls else []))
        start = RUNS / name / "eval" / "start" / key / "items.jsonl"
        items = read_items(folder / "items.jsonl")
        found[key] = summary(items) | ({} if label else {"gain": gained(items, read_items(start))})
    return {"sets": found} if found else {}


def start_of(experiment: Experiment, name: str) -> Record:
    """What the runs start from: the start weights on the experiment's sets, and random clicks on
    its held-out tasks.
    """
    config = load(experiment.config, list(experiment.common), RunConfig)
    found = evaluated(experiment, name, Path(config.model.path), label="start")
    if experiment.random_episodes and config.data.eval:
        rows = [
            json.loads(line)
            for line in Path(config.data.eval).read_text(encoding="utf-8").splitlines()
        ]
        found["random"] = sources(
            play(rows, config.environment.episode.max_turns, experiment.random_episodes)
        )
    return found


def differences(experiment: Experiment, runs: Mapping[str, Mapping[str, Record]]) -> Record:
    """Seed -> arm -> how it differs from the first arm, of runs whose folders are here: a
    comparison reads every answer.
    """
    found: Record = {}
    first = next(iter(experiment.arms))
    for seed, by_arm in runs.items():
        here = {
            arm: run
            for arm, run in by_arm.items()
            if "held_out" in run and Path(run["folder"]).is_dir()
        }
        if first in here:
            found[seed] = {
                arm: _difference(run, here[first]) for arm, run in here.items() if arm != first
            }
    return {seed: by_arm for seed, by_arm in found.items() if by_arm}


def pooled(experiment: Experiment, runs: Mapping[str, Mapping[str, Record]]) -> Record:
    """Arm -> its gain over all seeds, and how it differs from the first arm, of runs whose folders
    are here.

    A task's score is its mean over the seeds; the intervals are over tasks.
    """
    found: Record = {}
    ends = {arm: _ends(arm, runs) for arm in experiment.arms}
    _, first = next(iter(ends.values()))
    for number, (arm, (before, after)) in enumerate(ends.items()):
        if after:
            found[arm] = {"gain": gained(after, before)}
        if after and first and number:
            found[arm]["difference"] = gained(after, first)
    return found


def _ends(arm: str, runs: Mapping[str, Mapping[str, Record]]) -> tuple[list[Item], list[Item]]:
    """All seeds' items at the first and at the last evaluation of an arm."""
    before: list[Item] = []
    after: list[Item] = []
    for by_arm in runs.values():
        run = by_arm.get(arm)
        if run is None or not Path(run["folder"]).is_dir():
            continue
        evaluations = RunFolder.at(Path(run["folder"])).evaluations
        steps = [int(step) for step in run["held_out"]]
        before += read_items(evaluations.file(min(steps)))
        after += read_items(evaluations.file(max(steps)))
    return before, after


def _difference(run: Record, other: Record) -> Record:
    """``run`` minus ``other`` at the last evaluation that both have."""
    pair = run, other
    step = min(max(map(int, each["held_out"])) for each in pair)
    ours, theirs = (
        read_items(RunFolder.at(Path(each["folder"])).evaluations.file(step)) for each in pair
    )
    return {
        "steps": [step] * 2,
        "tokens": [each["held_out"][str(step)]["tokens"] for each in pair],
        **gained(ours, theirs),
    }
