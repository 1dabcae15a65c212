"""The experiments that ``python -m benchmarks.evidence NAME`` runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SUPERVISED = "supervised"
"""The arm that takes supervised steps on the same rows for the seconds that the first arm's steps
took, with seed 0 only.
"""


@dataclass(frozen=True)
class HeldOutRows:
    """Rows that ``rayloop eval`` plays with every trained checkpoint and with the start weights."""

    path: str
    samples: int = 0
    controls: bool = False


@dataclass(frozen=True)
class Experiment:
    """Runs of one configuration: every arm with every seed.

    ``arms``: overrides by name; the others are compared with the first.

    ``needs``: the commands that make what the runs read. ``shown``: scores of the tables.
    ``promised``: kind of answer -> least gain of the reward, within ``seconds``.
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
    pooled: bool = False
    """Also record the gain of each arm over all seeds, with an interval over tasks."""
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

    @property
    def curves(self) -> dict[str, str]:
        """Score -> the training metric of every step that the picture draws."""
        if self.picture is None or self.by_source:
            return {}
        metrics = {score: f"reward/component/{score}/mean" for score in self.shown}
        if "reward" in metrics:
            metrics["reward"] = "reward/mean"
        return metrics


def _taught(weight: float, *more: str) -> tuple[str, ...]:
    """The KL to the quickstart's last checkpoint as a term of the loss, also of groups with equal
    rewards.
    """
    kl = f"policy.loss={{clip_high: 0.28, kl: k2, kl_coef: {weight}}}"
    return ("reference.path=runs/data/teacher", "algorithm.filtering.filters=[]", kl, *more)


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
        picture=Path("docs") / f"variants_{recipe}.png",
    )


_TEN_STEPS = (
    "checkpoint={resume: never, every: 10}",
    "evaluation.every=10",
    "steps=10",
)
_WARM_STARTS = "python -m tools.makers.warm_starts"
_QWEN_POINTS = "{coordinates: absolute, min_pixels: 37632, max_pixels: 37632}"
"""Pixels of the resized screenshot, whose size is that of ``model.max_pixels`` in the recipe."""

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
        "GRPO from the shipped checkpoint, beside permuted rewards and supervised steps, on test"
        " pages and unseen page types",
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
    "arpo_short": Experiment(
        "multi-turn GRPO on four pages of the live browser, in a third of the quickstart's"
        " episodes",
        Path("recipes/arpo/short.yaml"),
        ("success",),
        common=("checkpoint.resume=never",),
        by_source=True,
    ),
    "languages": Experiment(
        "the pages of arpo_short in UI-TARS' and in Qwen2.5-VL's language, from warm starts that"
        " the writer made",
        Path("recipes/arpo/short.yaml"),
        ("success",),
        common=_TEN_STEPS,
        pooled=True,
        arms={
            "ui_tars": ("model.path=runs/models/languages/ui_tars",),
            "qwen2_5_vl": (
                "model.path=runs/models/languages/qwen2_5_vl",
                "environment.language=qwen2_5_vl",
                f"environment.episode.environment.with.pointing={_QWEN_POINTS}",
            ),
        },
        needs=_WARM_STARTS,
    ),
    "histories": Experiment(
        "the newest image alone in view, against all of them, at the same number of episodes, on"
        " pages of several turns",
        Path("recipes/arpo/short.yaml"),
        ("success",),
        common=(
            *_TEN_STEPS,
            "data.train=runs/data/histories/train.jsonl",
            "data.eval=runs/data/histories/val.jsonl",
        ),
        arms={
            "full": ("environment.history=full", "model.path=runs/models/languages/ui_tars"),
            "last_images 1": (
                "environment.history={last_images: 1}",
                "model.path=runs/models/languages/ui_tars_last_image",
            ),
        },
        pooled=True,
        needs=(
            f"{_WARM_STARTS}; python -m rayloop data prepare arpo --out runs/data/histories --train"
            " 160 --val 48 --pages click-button-sequence click-collapsible click-dialog-2"
            " focus-text-2"
        ),
    ),
    "pyvision": Experiment(
        "whether a policy that mostly guesses learns to look with code",
        Path("recipes/pyvision/quickstart.yaml"),
        ("accuracy", "calls"),
        common=("checkpoint.resume=never",),
        needs="python -m rayloop data prepare pyvision --out runs/data/pyvision",
        picture=Path("docs/pyvision.png"),
    ),
    "chart_rvr": Experiment(
        "Chart-RVR's rewards over the warm start, with wrong charts as controls",
        Path("recipes/chart_rvr/quickstart.yaml"),
        ("reward", "accuracy", "table"),
        common=("data.eval=runs/data/chart_rvr/test.jsonl", "evaluation.samples=4"),
        needs="python -m rayloop data prepare chart_rvr --out runs/data/chart_rvr",
    ),
    "digits": Experiment(
        "text: sorting digits after a supervised warm start",
        Path("recipes/digits/quickstart.yaml"),
        ("reward",),
        seeds=(0,),
        needs=(
            "python -m rayloop data prepare digits --out runs/data/digits; python -m rayloop sft"
            " recipes/digits/warm.yaml"
        ),
    ),
    "reasoning": Experiment(
        "SmolLM2-135M-Instruct on two tasks of reasoning-gym: asked directly, and by an agent with"
        " an OpenAI client",
        Path("recipes/reasoning/quickstart.yaml"),
        ("reward", "exact"),
        common=("checkpoint.resume=never", "model.path=runs/models/smollm2"),
        arms={"single": (), "agent": ()},
        files={"agent": Path("recipes/reasoning/agent.yaml")},
        by_source=True,
        needs=(
            "python -m rayloop data prepare reasoning --out runs/data/reasoning;"
            " tools/makers/smollm2.py"
        ),
        promised={"sampled": 0.15},
        seconds=3600.0,
    ),
    "gigpo": Experiment(
        "GiGPO, whose turns are compared where the screen is the same, against GRPO, on multi-turn"
        " pages in the live browser",
        Path("recipes/arpo/quickstart.yaml"),
        ("success",),
        common=(
            "steps=12",
            "evaluation.every=12",
            "evaluation.samples=2",
            "algorithm.replay.kind=none",
            "checkpoint.resume=never",
            "algorithm.filtering={filters: [], ranking: fifo}",
        ),
        arms={"grpo": (), "gigpo": ("algorithm.advantage.kind=gigpo",)},
        by_source=True,
    ),
    "ablation_replay": Experiment(
        "ARPO: GRPO against GRPO with replay where successes are rare",
        Path("recipes/arpo/quickstart.yaml"),
        ("success",),
        common=(
            "data.train=runs/data/arpo_sparse/train.jsonl",
            "data.eval=runs/data/arpo_sparse/val.jsonl",
            "steps=20",
            "evaluation.every=10",
            "evaluation.samples=2",
        ),
        arms={
            "grpo": ("algorithm.replay.kind=none",),
            "with replay": ("algorithm.replay.kind=corrected",),
        },
        needs=(
            "python -m rayloop data prepare arpo --out runs/data/arpo_sparse "
            "--pages click-button click-button-sequence click-test-2 --train 24 --val 48"
        ),
    ),
    "ablation_tool_bonus": Experiment(
        "PyVision with and without its reward for each call",
        Path("recipes/pyvision/quickstart.yaml"),
        ("accuracy", "calls"),
        common=("steps=12", "evaluation.every=4"),
        arms={
            "without": ("reward.source.with.per_call=0.0",),
            "with": ("reward.source.with.per_call=0.1",),
        },
        needs="python -m rayloop data prepare pyvision --out runs/data/pyvision",
    ),
    "distillation": Experiment(
        "on-policy distillation from the quickstart's last checkpoint, beside GRPO and both"
        " together",
        Path("recipes/arc_vision/quickstart.yaml"),
        ("reward",),
        common=(
            "checkpoint={resume: never, every: 100}",
            "steps=20",
            "evaluation.every=5",
            "evaluation.controls=false",
            "weight_sync.logprob_check=stop",
            "algorithm.groups_per_step=8",
            "policy.optimizer.schedule=constant",
            "report.boxes=null",
        ),
        arms={
            "grpo": (),
            "distill": _taught(1.0, "algorithm.advantage.kind=distill"),
            "both": _taught(1.0),
        },
        needs=(
            "python -m rayloop train recipes/arc_vision/quickstart.yaml name=teacher; "
            "python -m rayloop export runs/teacher runs/data/teacher"
        ),
    ),
    "variants_arc_vision": _variants("arc_vision", "iou", "steps=30", "evaluation.every=10"),
    "variants_arpo": _variants("arpo", "success", "steps=12", "evaluation.every=6"),
    "variants_pyvision": _variants(
        "pyvision",
        "accuracy",
        "steps=12",
        "evaluation.every=4",
        needs=(
            "python -m rayloop data prepare pyvision --out runs/data/pyvision; python -m"
            " tools.makers.code_demonstrations runs/data/pyvision_original --rows 400 --config"
            " recipes/pyvision/quickstart_original.yaml; python -m rayloop sft"
            " tools/makers/pyvision/original.yaml"
        ),
    ),
    "variants_chart_rvr": _variants(
        "chart_rvr",
        "accuracy",
        "steps=20",
        "evaluation.every=10",
        "data.eval=runs/data/chart_rvr/test.jsonl",
        needs="python -m rayloop data prepare chart_rvr --out runs/data/chart_rvr",
    ),
}
