"""The experiments that ``python -m benchmarks.evidence NAME`` runs, and the filters and the reward that only they use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rayloop.core.groups import Group, Member, Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.recipes.digits.data import SortReward

SUPERVISED = "supervised"
"""The arm that takes supervised steps on the same rows for the seconds that the first arm's steps took, with seed 0 only."""


@dataclass(frozen=True)
class HeldOutRows:
    """Rows that ``rayloop eval`` plays with every trained checkpoint and with the start weights."""

    path: str
    samples: int = 0
    controls: bool = False


@dataclass(frozen=True)
class Experiment:
    """Runs of one configuration: every arm with every seed. ``arms``: overrides by name; the others are compared with the first.

    ``needs``: the commands that make what the runs read. ``shown``: scores of the tables. ``equal``: arms are compared after as
    many steps, or after as many generated tokens (each arm's last evaluation within the tokens of the arm that generated least).
    ``training``: metrics that are kept of every step. ``promised``: kind of answer -> least gain of the reward, within ``seconds``.
    """

    about: str
    config: Path
    shown: tuple[str, ...]
    common: tuple[str, ...] = ()
    arms: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"as shipped": ()})
    files: Mapping[str, Path] = field(default_factory=dict)
    """Configuration files of the arms that have their own."""
    seeds: tuple[int, ...] = (0, 1, 2)
    needs: str = ""
    equal: Literal["steps", "tokens"] = "steps"
    training: tuple[str, ...] = ("reward/mean",)
    by_source: bool = False
    """Also record the scores by source, and draw them."""
    random_episodes: int = 0
    """Episodes of random clicks for each held-out task, as a rival."""
    sets: Mapping[str, HeldOutRows] = field(default_factory=dict)
    supervised: Path | None = None
    """Configuration of the arm SUPERVISED."""
    promised: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    picture: Path | None = None


def _filtering(limit: str, more: str = "ranking: fifo") -> tuple[str, ...]:
    return (
        "evaluation.every=5",
        f"algorithm.filtering={{{more}, min_fraction: 0.05, filters: [{{kind: equal_rewards}}, "
        f"{{use: 'benchmarks.evidence.experiments:{limit}'}}]}}",
    )


def _variants(recipe: str, score: str, *common: str, needs: str = "") -> Experiment:
    """A recipe's quickstart beside the same with the published reward, tools and rules."""
    folder = Path("recipes") / recipe
    return Experiment(
        f"{recipe}: the quickstart, and the same in its original variant",
        folder / "quickstart.yaml",
        (score, "reward"),
        common=("checkpoint.resume=never", *common),
        arms={"corrected": (), "original": ()},
        files={"original": folder / "quickstart_original.yaml"},
        needs=needs,
        training=(f"reward/component/{score}/mean", "reward/mean", "rollout/trained", "rollout/tokens"),
        picture=Path("docs") / f"variants_{recipe}.png",
    )


EXPERIMENTS = {
    "quickstart": Experiment(
        "the quickstart as it is shipped: gain, controls, cost",
        Path("recipes/arc_vision/quickstart.yaml"),
        ("reward",),
        common=("checkpoint.resume=never",),
        promised={"sampled": 0.10, "greedy": 0.05},
        seconds=240.0,
    ),
    "arc_vision": Experiment(
        "GRPO from the shipped checkpoint, beside permuted rewards and supervised steps, on test pages and unseen page types",
        Path("recipes/arc_vision/learn.yaml"),
        ("iou", "click"),
        arms={"grpo": (), "permuted": ("algorithm.advantage.kind=permuted",)},
        sets={
            "test": HeldOutRows("recipes/arc_vision/pages/test.parquet", samples=4, controls=True),
            "ood": HeldOutRows("recipes/arc_vision/pages/ood.parquet"),
        },
        supervised=Path("recipes/arc_vision/continue.yaml"),
    ),
    "arpo": Experiment(
        "multi-turn GRPO in the live browser, by page, beside random clicks",
        Path("recipes/arpo/quickstart.yaml"),
        ("success",),
        by_source=True,
        random_episodes=4,
        picture=Path("docs/arpo.png"),
    ),
    "pyvision": Experiment(
        "whether a policy that mostly guesses learns to look with code",
        Path("recipes/pyvision/quickstart.yaml"),
        ("accuracy", "calls"),
        common=("checkpoint.resume=never",),
        needs="python -m rayloop data prepare pyvision --out runs/data/pyvision",
        training=("reward/component/accuracy/mean", "reward/component/calls/mean"),
        picture=Path("docs/pyvision.png"),
    ),
    "chart_rvr": Experiment(
        "Chart-RVR's rewards over the warm start, with wrong charts as controls",
        Path("recipes/chart_rvr/quickstart.yaml"),
        ("reward", "accuracy", "table"),
        common=("data.eval=runs/data/chart_rvr/test.jsonl", "evaluation.samples=4"),
        needs="python -m rayloop data prepare chart_rvr --small --out runs/data/chart_rvr",
    ),
    "digits": Experiment(
        "text: sorting digits after a supervised warm start",
        Path("recipes/digits/quickstart.yaml"),
        ("reward",),
        seeds=(0,),
        needs="python -m rayloop data prepare digits --out runs/data/digits; python -m rayloop sft recipes/digits/warm.yaml",
    ),
    "ablation_filtering": Experiment(
        "partial dynamic filtering against none and against filtering of whole groups, at equal generated tokens",
        Path("recipes/digits/quickstart.yaml"),
        ("reward",),
        common=(
            "reward.source={use: 'benchmarks.evidence.experiments:Exact'}", "steps=60",
            "rollout.sampling={max_tokens: 10, temperature: 0.8}", "evaluation={every: 10, samples: 2}", "checkpoint.every=100",
        ),
        arms={
            "partial": _filtering("Members"),
            "none": ("algorithm.filtering={filters: [], ranking: fifo}", "steps=100"),
            "whole group": _filtering("WholeGroup"),
            "partial, ranked": _filtering("Members", "groups_per_generation: 24"),
        },
        needs="python -m rayloop data prepare digits --out runs/data/digits; python -m rayloop sft recipes/digits/warm.yaml",
        equal="tokens",
        training=("reward/mean", "rollout/tokens", "rollout/trajectories", "rollout/trained"),
    ),
    "ablation_replay": Experiment(
        "ARPO: GRPO against GRPO with replay where successes are rare",
        Path("recipes/arpo/quickstart.yaml"),
        ("success",),
        common=(
            "data.train=runs/data/arpo_sparse/train.jsonl", "data.eval=runs/data/arpo_sparse/val.jsonl", "steps=20",
            "evaluation.every=10", "evaluation.samples=2",
        ),
        arms={"grpo": ("algorithm.replay.kind=none",), "with replay": ("algorithm.replay.kind=corrected",)},
        needs="python -m rayloop data prepare arpo --out runs/data/arpo_sparse "
        "--pages click-button click-button-sequence click-test-2 --train 24 --val 48",
        training=(
            "reward/component/success/mean", "rollout/trained", "rollout/replayed", "rollout/all_wrong", "rollout/tokens",
        ),
    ),
    "ablation_tool_bonus": Experiment(
        "PyVision with and without its reward for each call",
        Path("recipes/pyvision/quickstart.yaml"),
        ("accuracy", "calls"),
        common=("steps=12", "evaluation.every=4"),
        arms={"without": ("reward.source.with.per_call=0.0",), "with": ("reward.source.with.per_call=0.1",)},
        needs="python -m rayloop data prepare pyvision --out runs/data/pyvision",
        training=("reward/component/accuracy/mean", "reward/component/calls/mean", "rollout/trained", "rollout/tokens"),
    ),
    "variants_arc_vision": _variants("arc_vision", "iou", "steps=30", "evaluation.every=10"),
    "variants_arpo": _variants("arpo", "success", "steps=12", "evaluation.every=6"),
    "variants_pyvision": _variants(
        "pyvision", "accuracy", "steps=12", "evaluation.every=4",
        needs="python -m rayloop data prepare pyvision --out runs/data/pyvision; python -m benchmarks.makers.code_demonstrations "
        "runs/data/pyvision_original --rows 400 --config recipes/pyvision/quickstart_original.yaml; python -m rayloop sft "
        "benchmarks/makers/pyvision/original.yaml",
    ),
    "variants_chart_rvr": _variants(
        "chart_rvr", "accuracy", "steps=20", "evaluation.every=10", "data.eval=runs/data/chart_rvr/test.jsonl",
        needs="python -m rayloop data prepare chart_rvr --small --out runs/data/chart_rvr"
    ),
}  # fmt: skip


class Exact:
    """1 when all digits are right, else 0: groups are often right or wrong throughout."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The component ``exact`` of SortReward as the reward."""
        found = SortReward().score(trajectory, task, context)
        return Scored(found.components["exact"], {}, found.flags) if isinstance(found, Scored) else found


class Members:
    """Refuse the answers that are no list of digits, as PyVision refuses broken trajectories: the others of the group stay."""

    def refused(self, group: Group) -> Mapping[int, str]:
        """Index of each unparsable member -> reason."""
        return {i: "unparsable" for i, member in enumerate(group.members) if member.kept and _broken(member)}


class WholeGroup:
    """Refuse a whole group in which one answer is refused."""

    def refused(self, group: Group) -> Mapping[int, str]:
        """Index of each kept member -> reason, when ``Members`` refuses one of them."""
        kept = [i for i, member in enumerate(group.members) if member.kept]
        return dict.fromkeys(kept, "group") if Members().refused(group) else {}


def _broken(member: Member) -> bool:
    return isinstance(member.outcome, Scored) and "unparsable" in member.outcome.flags
