"""What a part of the algorithm is worth: the same configuration with it and without it, three seeds.

    python -m rayloop.benchmarks.evidence.ablations QUESTION [--only SEED] [--arm ARM] [--note TEXT] [--out FILE]

Questions: ``filtering`` (partial dynamic filtering against none and against filtering of whole groups, at equal generated tokens),
``replay`` (ARPO: GRPO against GRPO with replay where successes are rare), ``tool_bonus`` (PyVision with and without its reward for
each call). Each run is put into ablation_QUESTION.json with the hash of the configuration that it ran, and ``--note``, what else
the machine did; one that is there with this hash, and its folder, is taken as it is. Of every evaluation: steps, tokens generated
until then, held-out scores. Arms are compared with the first one seed by seed, paired by task, with 95 % bootstrap intervals.
What a question needs to be there is in ``QUESTIONS``, as commands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rayloop.benchmarks.evidence.seeds import digest, trained
from rayloop.benchmarks.measure import machine
from rayloop.config.settings import load
from rayloop.core.groups import Group, Member, Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.measure.controls import RIGHT, SAMPLED, Item, gains, means
from rayloop.measure.intervals import Interval
from rayloop.recipes.digits.reward import SortReward
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items

RUNS = Path("runs/evidence")
SEEDS = (0, 1, 2)
PLACES = 4
"""Decimals that are kept."""
KINDS = {SAMPLED: "sampled", RIGHT: "greedy"}


@dataclass(frozen=True)
class Question:
    """``arms``: overrides by name, the first is what the others are compared with. ``shown``: scores of the tables.

    ``equal``: arms are compared after as many steps, or after as many generated tokens (each arm's last evaluation within the
    tokens of the arm that generated least).
    """

    config: Path
    needs: str
    common: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    shown: tuple[str, ...]
    equal: Literal["steps", "tokens"] = "steps"
    training: tuple[str, ...] = field(default=("reward/mean",))
    """Metrics that are kept for every step."""


QUESTIONS = {
    "filtering": Question(
        Path("recipes/digits/quickstart.yaml"),
        "python -m rayloop data prepare digits --out runs/data/digits; python -m rayloop sft recipes/digits/warm.yaml",
        (
            "reward.source={use: 'rayloop.benchmarks.evidence.ablations:Exact'}", "steps=60",
            "rollout.sampling={max_tokens: 10, temperature: 0.8}",
            "evaluation={every: 10, samples: 2}", "checkpoint.every=100",
        ),
        {
            "partial": (
                "evaluation.every=5",
                "algorithm.filtering={ranking: fifo, min_fraction: 0.05, filters: [{kind: equal_rewards}, "
                "{use: 'rayloop.benchmarks.evidence.ablations:Members'}]}",
            ),
            "none": ("algorithm.filtering={filters: [], ranking: fifo}", "steps=100"),
            "whole group": (
                "evaluation.every=5",
                "algorithm.filtering={ranking: fifo, min_fraction: 0.05, filters: [{kind: equal_rewards}, "
                "{use: 'rayloop.benchmarks.evidence.ablations:WholeGroup'}]}",
            ),
            "partial, ranked": (
                "evaluation.every=5",
                "algorithm.filtering={groups_per_generation: 24, min_fraction: 0.05, filters: [{kind: equal_rewards}, "
                "{use: 'rayloop.benchmarks.evidence.ablations:Members'}]}",
            ),
        },
        ("reward",),
        "tokens",
        ("reward/mean", "rollout/tokens", "rollout/trajectories", "rollout/trained"),
    ),
    "replay": Question(
        Path("recipes/arpo/quickstart.yaml"),
        "python -m rayloop data prepare arpo --out runs/data/arpo_sparse "
        "--pages click-button click-button-sequence click-test-2 --train 24 --val 48",
        (
            "data.train=runs/data/arpo_sparse/train.jsonl", "data.eval=runs/data/arpo_sparse/val.jsonl", "steps=20",
            "evaluation.every=10", "evaluation.samples=2",
        ),
        {"grpo": ("algorithm.replay.kind=none",), "with replay": ("algorithm.replay.kind=corrected",)},
        ("success",),
        "steps",
        ("reward/component/success/mean", "rollout/trained", "rollout/replayed", "rollout/all_wrong", "rollout/tokens"),
    ),
    "tool_bonus": Question(
        Path("recipes/pyvision/quickstart.yaml"),
        "python -m rayloop data prepare pyvision --out runs/data/pyvision",
        ("steps=12", "evaluation.every=4"),
        {"without": ("reward.source.with.per_call=0.0",), "with": ("reward.source.with.per_call=0.1",)},
        ("accuracy", "calls"),
        "steps",
        ("reward/component/accuracy/mean", "reward/component/calls/mean", "rollout/trained", "rollout/tokens"),
    ),
}  # fmt: skip


class Exact:
    """1 when all digits are right, else 0: groups are often right or wrong throughout."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        found = SortReward().score(trajectory, task, context)
        return Scored(found.components["exact"], {}, found.flags) if isinstance(found, Scored) else found


class Members:
    """Refuse the answers that are no list of digits, as PyVision refuses broken trajectories: the others of the group stay."""

    def refused(self, group: Group) -> Mapping[int, str]:
        return {i: "unparsable" for i, member in enumerate(group.members) if member.kept and broken(member)}


class WholeGroup:
    """Refuse a whole group in which one answer is refused."""

    def refused(self, group: Group) -> Mapping[int, str]:
        kept = [i for i, member in enumerate(group.members) if member.kept]
        return dict.fromkeys(kept, "group") if Members().refused(group) else {}


def broken(member: Member) -> bool:
    return isinstance(member.outcome, Scored) and "unparsable" in member.outcome.flags


def main() -> None:
    parser = argparse.ArgumentParser(description="What a part of the algorithm is worth, with three seeds.")
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--only", type=int, metavar="SEED", help="this seed alone")
    parser.add_argument("--arm", help="this arm alone")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    parser.add_argument("--out", type=Path, help="default: ablation_QUESTION.json beside this file")
    chosen = parser.parse_args()
    question = QUESTIONS[chosen.question]
    out = chosen.out or Path(__file__).with_name(f"ablation_{chosen.question}.json")
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else {}
    for seed in SEEDS if chosen.only is None else [chosen.only]:
        for arm in question.arms if chosen.arm is None else [chosen.arm]:
            there = runs.setdefault(str(seed), {})
            if not usable(there.get(arm), digest(configured(question, arm))):
                there[arm] = {"note": chosen.note, **measured(question, arm, seed, RUNS / chosen.question)}
            found = {"equal": question.equal, "runs": runs, "compared": compared(question, runs)}
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(markdown(question, runs)))


def usable(run: Mapping[str, Any] | None, config: str) -> bool:
    """Whether this run was made with the configuration, and its folder is here."""
    return run is not None and run["config"] == config and Path(run["folder"]).is_dir()


def configured(question: Question, arm: str) -> RunConfig:
    return load(question.config, [*question.common, *question.arms[arm]], RunConfig)


def measured(question: Question, arm: str, seed: int, runs: Path) -> dict[str, Any]:
    """One run from its command to its end. Raises BenchFailed when it fails."""
    folder = runs / f"{arm.replace(', ', '-').replace(' ', '_')}-{seed}"
    spent = trained(question.config, folder, seed, [*question.common, *question.arms[arm]])
    run = RunFolder.at(folder)
    records = list(run.metrics)
    tokens = [int(record["rollout/tokens"]) for record in records]
    return {
        "config": digest(configured(question, arm)),
        "folder": str(folder),
        "machine": machine(),
        **spent,
        "training": {name: [round(record.get(name, 0.0), PLACES) for record in records] for name in question.training},
        "held_out": {
            str(step): {"tokens": sum(tokens[:step]), **shown(read_items(file), question.shown)}
            for step, file in run.evaluations.files().items()
        },
    }  # fmt: skip


def shown(items: Sequence[Item], names: Sequence[str]) -> dict[str, Any]:
    """Kind of answer -> score -> mean with its interval."""
    found = {kind: means(item for item in items if item.arm == kind) for kind in KINDS}
    return {KINDS[kind]: {name: rounded(by[name]) for name in names} for kind, by in found.items() if by}


def compared(question: Question, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Seed -> arm -> where it is compared with the first arm, and by how much it is better, paired by task. Only of runs that are
    here with their folders: comparing reads what each answered."""
    found: dict[str, Any] = {}
    first = next(iter(question.arms))
    for seed, there in runs.items():
        by_arm = {arm: run for arm, run in there.items() if Path(run["folder"]).is_dir()}
        if first in by_arm:
            budget = min(max(run["tokens"] for run in arm["held_out"].values()) for arm in by_arm.values())
            found[seed] = {arm: difference(question, run, by_arm[first], budget) for arm, run in by_arm.items() if arm != first}
    return found


def difference(question: Question, run: Mapping[str, Any], other: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """``run`` minus ``other`` at the last evaluation that both have, or at each one's last within ``budget`` tokens."""
    steps = [last(each, budget if question.equal == "tokens" else None) for each in (run, other)]
    if question.equal == "steps":
        steps = [min(steps)] * 2
    ours, theirs = (
        read_items(RunFolder.at(Path(each["folder"])).evaluations.file(step))
        for each, step in zip((run, other), steps, strict=True)
    )
    return {
        "steps": steps,
        "tokens": [each["held_out"][str(step)]["tokens"] for each, step in zip((run, other), steps, strict=True)],
        **{
            name: {score: rounded(by[score]) for score in question.shown}
            for kind, name in KINDS.items()
            if (by := gains(only(ours, kind), only(theirs, kind)))
        },
    }


def last(run: Mapping[str, Any], budget: int | None) -> int:
    """The step of the last evaluation that had generated at most ``budget`` tokens."""
    return max(int(step) for step, held in run["held_out"].items() if budget is None or held["tokens"] <= budget)


def only(items: Sequence[Item], kind: str) -> list[Item]:
    return [item for item in items if item.arm == kind]


def rounded(value: Interval) -> list[float | None]:
    return [None if number is None else round(number, PLACES) for number in value]


def markdown(question: Question, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table of docs/results.md: each run where it is compared, and its difference to the first arm."""
    differences = compared(question, runs)
    lines = [
        "| seed | arm | s | CPU s | steps | tokens | trained | "
        + " | ".join(f"{s}, {k}" for s in question.shown for k in KINDS.values())
        + " |"
    ]
    lines.append("|---" * (7 + len(KINDS) * len(question.shown)) + "|")
    for seed, by_arm in sorted(runs.items()):
        for arm, run in ((arm, by_arm[arm]) for arm in question.arms if arm in by_arm):
            gap = differences.get(seed, {}).get(arm)
            step = gap["steps"][0] if gap else max(map(int, run["held_out"]))
            held = run["held_out"][str(step)]
            trained_on = int(sum(run["training"]["rollout/trained"][:step]))
            cells = [seed, arm, run["wall_s"], run["cpu_s"], step, held["tokens"], trained_on]
            cells += [cell(held, gap, score, kind) for score in question.shown for kind in KINDS.values()]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def cell(held: Mapping[str, Any], gap: Mapping[str, Any] | None, score: str, kind: str) -> str:
    mean = f"{held[kind][score][0]:.3f}"
    if gap is None:
        return mean
    value, low, high = gap[kind][score]
    return f"{mean} ({value:+.3f})" if low is None else f"{mean} ({value:+.3f} [{low:+.3f}, {high:+.3f}])"


if __name__ == "__main__":
    main()
