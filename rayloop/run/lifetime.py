"""Settings of what happens around the steps of a run: checkpoints, evaluation, reports, recovery, preemption. No torch, no ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from rayloop.config.removed import Removed
from rayloop.config.settings import Component, LocalPath, SettingsModel

COMPILING = ("vllm", "sglang")
"""Engines that compile and capture graphs when they start on a GPU."""
COMPILED = 1200.0
"""Seconds that they have for it by default (``recovery.start_timeout``); nothing has measured it yet (benchmarks/gpu)."""


class CheckpointSettings(SettingsModel):
    removed: ClassVar[Mapping[str, Removed]] = {
        "max_failures": Removed(3, "the fourth checkpoint in a row that cannot be saved ends the run")
    }

    every: int = Field(10, ge=1)
    """Steps between checkpoints; the last step is always saved. Lower it where machines may be taken away, raise it when saving
    is slow."""
    asynchronous: bool = False
    """Training goes on while a checkpoint is written, from a copy in the memory of the ranks' machines, as large as the checkpoint.
    Turn it on where saving takes as long as steps do and that memory is there (docs/reliability.md)."""
    keep: int = Field(2, ge=1)
    """Complete checkpoints that stay on disk; each is the weights and the optimizer's state. Raise it to go back further."""
    keep_best: bool = False
    """The checkpoint of the best held-out reward is saved whenever an evaluation is the best so far, and stays besides ``keep``, as
    ``checkpoints/best``. On for runs that may get worse, and with ``evaluation.patience``."""
    resume: LocalPath = "auto"
    """auto: continue from the newest complete checkpoint if there is one; never; or the folder of a checkpoint. A named
    folder is what every start begins from, until it has saved itself: leave it out to go on with what was trained since."""
    clear_quarantine: bool = False
    """Play again what the run had quarantined before this start. Set it once, after what made good rows fail has been repaired: a
    full disk, a broken environment."""


class SolvedSettings(SettingsModel):
    """Which answers are right, where an answer is right or wrong: pass@k, and tasks that a policy can solve."""

    score: str = "reward"
    """The reward, or the name of one of its components, such as ``success`` or ``click``."""
    least: float = 1.0
    """The score from which an answer is right; lower it for shares, such as 0.5 for an IoU."""


class EvaluationSettings(SettingsModel):
    every: int = Field(0, ge=0)
    """Steps between evaluations on ``data.eval``; 0: never. With it, also before the first and after the last step."""
    limit: int | None = Field(None, gt=0)
    """Rows evaluated, as many of each data source and spread over the file, always the same; None: all. Set it
    when evaluation takes longer than what it tells is worth."""
    patience: int | None = Field(None, ge=1)
    """Evaluations in a row without a better held-out reward after which the run ends, as finished; None: never. Set it, with
    ``checkpoint.keep_best``, where more steps may only overfit. The controls of the last step are then left out."""
    greedy: bool = True
    """The likeliest answer instead of a sampled one: less noise, but not the policy that is trained."""
    samples: int = Field(0, ge=0)
    """Answers per row that are sampled as in training, besides the greedy one: their mean is the reward that is trained, a curve
    of its own. 4 show a gain of a few hundredths on a hundred rows. With ``greedy: false`` there is nothing but them."""
    solved: SolvedSettings = SolvedSettings()
    by: tuple[str, ...] = ()
    """Columns of the rows by whose values ``eval`` also shows the means, such as ``platform`` and ``element`` of ScreenSpot;
    ``platform+element`` by both together."""
    controls: bool = False
    """Before the first and after the last step, also play wrong images: does the policy look? On for evidence about images."""
    blind: Component | None = None
    """The best answers without an image, fitted on ``data.train``, as another control (rayloop/measure/controls.py), for
    example ``{use: "rayloop.recipes.arc_vision.controls:BlindBox"}``."""


class ReportSettings(SettingsModel):
    boxes: Component | None = None
    """Finds the boxes of ground truths and answers, which the report and ``boxes.png`` draw over the images, for
    example ``{use: "rayloop.recipes.arc_vision.boxes:GroundingBoxes"}``."""


class RecoverySettings(SettingsModel):
    replacements: int = Field(12, ge=0)
    """Times an hour that one actor (a slot of its role) may be replaced; then it waits, while others go on. Raise it on machines
    that are taken away often; 0 to see why an actor died."""
    minimum: int = Field(1, ge=1)
    """Actors of a role below which the run ends when they do not come back within ``start_timeout``; a role that has fewer needs
    all. Raise it when a run with one engine left costs more than it earns."""
    policy_restarts: int = Field(6, ge=0)
    """Times an hour that the policy group may be rebuilt from the last checkpoint. Raise it on machines that are taken away
    often; 0 to see why a rank died."""
    driver_restarts: int = Field(2, ge=0)
    """Times an hour that a driver that died is started anew from the last checkpoint. Raise it on machines that are taken away
    often; 0 to see why it died."""
    health_every: float = Field(5.0, gt=0)
    """Seconds between health checks of idle actors. Raise it when there are hundreds of actors."""
    health_timeout: float = Field(30.0, gt=0)
    """Seconds an actor may leave a health check unanswered before it is replaced. Raise it for nodes that are very busy."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds for placing and starting an actor; on GPUs 1,200 with vLLM and SGLang, which compile. Raise it where nodes come late,
    and for large models on slow storage; the policy's ranks have 600 at least."""
    stall_report: float = Field(30.0, gt=0)
    """Seconds in which nothing that the driver waits for ended, before a stall is reported, with stacks. Raise it when steps
    are so long that it tells nothing."""
    stall_timeout: float = Field(4500.0, gt=0)
    """The same before the run stops. Above the longest single call, a step of the trainer or an episode, or the two race: raise it
    with them (docs/choosing_settings.md has the order of all durations)."""


def with_time_to_compile(data: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings, with ``recovery.start_timeout`` where it is left out and the engine needs more than the default."""
    rollout, recovery = data.get("rollout"), data.get("recovery", {})
    if not (isinstance(rollout, Mapping) and isinstance(recovery, Mapping)) or "start_timeout" in recovery:
        return dict(data)
    engine, placement = rollout.get("engine"), rollout.get("placement")
    compiles = isinstance(engine, Mapping) and engine.get("kind") in COMPILING
    on_gpu = isinstance(placement, Mapping) and placement.get("num_gpus")
    return {**data, "recovery": {**recovery, "start_timeout": COMPILED}} if compiles and on_gpu else dict(data)


class PreemptionSettings(SettingsModel):
    grace: float = Field(120.0, gt=0)
    """Seconds after SIGTERM or SIGINT within which the run must be saved; an update under way is finished first. Below what
    the scheduler allows: the lead of Slurm's ``--signal``; Ray gives a stopped job 600 s on clusters that we start."""
