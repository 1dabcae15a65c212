"""The held-out evaluation of a run: when it is due, and what is played and recorded."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from rayloop.cluster.supervision.attempts import EpisodeRunner, evaluate_answers
from rayloop.core import incidents
from rayloop.core.deadlines import until_stopped
from rayloop.core.failures import Preempted
from rayloop.core.types import Task
from rayloop.measure.controls import Item
from rayloop.rollout.manager import RolloutManager
from rayloop.run.config import RunConfig
from rayloop.run.held_out import answer_requests, blind
from rayloop.run.reporter import Reporter


class EvaluatingRun(Protocol):
    """The parts of the driver that an evaluation uses.

    ``owes_evaluation``: an evaluation was stopped, and the run that continues begins with it.
    """

    config: RunConfig
    reporter: Reporter
    rollouts: RolloutManager
    runner: EpisodeRunner
    held_out: list[Task]
    stopping: asyncio.Event
    step: int
    owes_evaluation: bool

    @property
    def done(self) -> bool:
        """Whether no further step is trained."""


async def evaluate_held_out(run: EvaluatingRun, *, ending: bool) -> None:
    """Play and record the held-out tasks when they are due (``_is_due``)."""
    if not run.held_out or not _is_due(run, ending=ending):
        return

    settings = run.config.evaluation
    is_first_or_last = run.done or ending or run.step == 0
    controls = settings.controls and is_first_or_last
    answers = answer_requests(run.config, run.held_out, controls=controls, samples=settings.samples)
    images: dict[str, bytes] = {}

    def keep_images(item: Item, images_by_hash: Mapping[str, bytes]) -> None:
        images.update(images_by_hash)

    report = run.rollouts.alarms.held_out
    evaluating = evaluate_answers(answers, run.runner, run.step, keep_images, report)

    run.owes_evaluation = True
    try:
        items = await until_stopped(run.stopping, evaluating)
    except Preempted:
        # ``owes_evaluation`` stays set: the run that continues begins with this evaluation.
        run.reporter.event(incidents.EvaluationStopped())
        return

    run.owes_evaluation = False
    if controls:
        items += blind(settings.blind, run.rollouts.dataset, run.held_out)
    run.reporter.evaluated(run.step, items, images)
    first_step = 0 if settings.first else settings.every
    run.rollouts.alarms.evaluated(first=run.step <= first_step)


def _is_due(run: EvaluatingRun, *, ending: bool) -> bool:
    """Whether this step is evaluated: every ``evaluation.every`` steps, and when the run ends."""
    settings = run.config.evaluation
    is_periodic = run.step % settings.every == 0 and (settings.first or run.step > 0)
    if ending:
        # The evaluation of a periodic step was played when the step ended.
        return not is_periodic
    return run.done or is_periodic
