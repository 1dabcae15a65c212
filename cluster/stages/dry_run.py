"""``python -m rayloop try``: one row as the model sees it, two sampled answers, and their rewards.

No Ray cluster is started. The reader, the renderer, the episode loop and the rollout and reward
classes run in this process.
"""

import asyncio
import copy
import json
import logging
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayloop.actors.reward import RewardActor
from rayloop.actors.rollout import RolloutActor, start_weights
from rayloop.chat.rendering import Rendered, Renderer
from rayloop.core.failures import (
    START_AGAIN_EXIT_CODE,
    ConfigError,
    DataFailure,
    EnvironmentFailed,
    RayloopError,
    WorkerStartFailed,
)
from rayloop.core.groups import Outcome, Scored, UnscoredKind
from rayloop.core.threads import complete, own_frames
from rayloop.core.types import (
    Completion,
    FinishReason,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
)
from rayloop.data.dataset import TRUTHS, Dataset
from rayloop.data.images import decode, untinted
from rayloop.data.validation import first_intact
from rayloop.engines.settings import EngineChoice, TransformersEngineSettings
from rayloop.envs.episode import CLOSE_TIMEOUT_S, run_episode
from rayloop.envs.grammar.actions import Mistake
from rayloop.envs.grammar.screens import ScreenSettings
from rayloop.envs.instance import Environments
from rayloop.rollout.scheduler import requests
from rayloop.run.config import RunConfig
from rayloop.run.records.rollouts import NEW_CONTEXT, jsonable
from rayloop.transports.settings import ObjectStoreTransport
from rayloop.view.formatting import rewarded, visible
from rayloop.view.screen_turns import actions_of, drawn

TRIAL_ANSWERS = 2
SHOWN_FAILURES = 3
SHOWN_TRUTH_CHARACTERS = 500
Write = Callable[[str], None]
Scoring = asyncio.Task[dict[TrajectoryId, Outcome]]


def try_row(config: RunConfig, row: int | None, show: Write = partial(print, flush=True)) -> int:
    """Play a row of ``data.train`` and ``show`` what happens.

    ``row`` is counted from 1; None: the first usable row. Returns 0 when both answers have a
    reward, 69 when the reward's service is unreachable, else 1. Raises RayloopError, as a run would
    before its first step.
    """

    def write(text: str) -> None:
        # Neither rows nor answers may control the terminal.
        show(visible(text))

    dataset, task = _select_row(config, row, write)
    write(f"{dataset.where(task)}: task {task.id}, one of {len(dataset)} usable rows")
    with tempfile.TemporaryDirectory(prefix="try-") as folder:
        return complete(_DryRun(config, task, folder, write).run())


def _select_row(config: RunConfig, row: int | None, write: Write) -> tuple[Dataset, Task]:
    failures: list[DataFailure] = []
    dataset = config.data.rows(config.data.train, failures.append, config.environment.kinds)
    for failure in failures[:SHOWN_FAILURES]:
        write(f"left out: {failure}")
    more = len(failures[SHOWN_FAILURES:])
    if more:
        write(f"left out: {more} more rows; `python -m rayloop data validate CONFIG` names them")

    if row is None:
        return dataset, first_intact(dataset, write, SHOWN_FAILURES)
    where = f"{config.data.train}:{row}"
    task = next((task for task in dataset if dataset.where(task) == where), None)
    if task is None:
        reasons = [failure.reason for failure in failures if failure.path == where]
        reason = reasons[0] if reasons else "there is no such row"
        raise ConfigError(f"--row {row}: {where}: {reason}")
    return dataset, task


def local_engine(engine: EngineChoice) -> EngineChoice:
    """The engine of the dry run.

    It is the configured one, or transformers in place of an engine that has separate processes and
    starts in minutes.
    """
    if engine.starts_slowly:
        return TransformersEngineSettings(dtype=engine.dtype)
    return engine


class _CheckingRenderer(Renderer):
    """Records in ``unshown`` the names of tools when the chat template shows none of them."""

    unshown: tuple[str, ...] = ()

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Rendered:
        rendered = super().prompt(messages, tools)
        if tools and rendered.token_ids == super().prompt(messages).token_ids:
            self.unshown = tuple(tool["function"]["name"] for tool in tools)
        return rendered


class _DryRun:
    """The episodes of one task, and the report about them."""

    def __init__(self, config: RunConfig, task: Task, folder: str, write: Write) -> None:
        self.config = config
        self.task = task
        self.folder = folder
        self.write = write
        self.episode = config.environment.episode
        environment = config.environment
        self.environments = Environments(
            self.episode.environment, environment.kinds, environment.history
        )
        self.renderer = _CheckingRenderer(config.model)
        self.seen = False
        self.written: set[str] = set()

    async def run(self) -> int:
        """Play and report.

        Reward and environment are made before the model is loaded, since the user wrote them.
        """
        reward = self.config.reward
        task = self.task
        with _making(reward.source.use):
            self.reward = RewardActor(self.config.model, reward, dry_run=True)
        self._write_preview(task)
        await self._check_environment(task)
        self.engine = await self._engine()
        ids = [TrajectoryId(1, sample) for sample in range(TRIAL_ANSWERS)]
        episodes = map(self._play, requests(self.config, task, ids, visit=1))
        results = await asyncio.gather(*episodes, return_exceptions=True)
        trajectories = [result for result in results if isinstance(result, Trajectory)]
        # Scored during the report: the answers are shown even while a judge does not answer.
        scoring = asyncio.create_task(self._outcomes(trajectories, task))
        codes = [
            await self._answered(number, result, scoring)
            for number, result in enumerate(results, start=1)
        ]
        advice = "; fix that before you train" if any(codes) else ""
        self.write(f"\n{codes.count(0)} of {TRIAL_ANSWERS} answers have a reward{advice}")
        return max(codes)

    async def _engine(self) -> RolloutActor:
        """A rollout actor that serves the start model, in this process."""
        began = time.monotonic()
        configured = self.config.engine
        settings = local_engine(configured)
        actor = RolloutActor(self.config.model, settings, ObjectStoreTransport(), self.folder)
        if not settings.own_weights:
            start = await asyncio.to_thread(start_weights, self.config.model, settings.dtype)
            await actor.load(start.manifest, start.source)
        instead = f" (for {configured.label})" if configured.starts_slowly else ""
        seconds = time.monotonic() - began
        self.write(
            f"model {self.config.model.path}, engine {settings.label}{instead}, loaded in"
            f" {seconds:.1f} s"
        )
        return actor

    async def _check_environment(self, task: Task) -> None:
        """Make the task's environment once.

        Raises WorkerStartFailed with the traceback when that fails.
        """
        environment = self.environments.of(task)
        try:
            with _making(environment.name):
                await environment.make(self.episode.step_timeout)
        finally:
            try:
                await environment.close(CLOSE_TIMEOUT_S)
            except Exception as error:
                raise WorkerStartFailed(
                    f"{environment.name}: close() raised on an environment that was made and not"
                    f" reset:\n{own_frames(error)}"
                ) from error

    async def _play(self, request: RolloutRequest) -> Trajectory:
        async with asyncio.timeout(self.config.environment.episode_timeout):
            # A copy, as through Ray: episodes do not see each other's changes to their task.
            request = copy.deepcopy(request)
            return await run_episode(
                request,
                self.environments.of(request.task),
                self.renderer,
                self.episode,
                self._generate,
                history=self.environments.history(request.task),
            )

    async def _generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Generate with the engine; the first prompt is shown before that."""
        if not self.seen:
            self.seen = True
            self._write_prompt(prompt)
            self._write_truth(self.task)
        async with asyncio.timeout(self.config.environment.episode_timeout):
            return await self.engine.engine.generate(prompt, sampling)

    def _write_preview(self, task: Task) -> None:
        """Write the first prompt of an environment that has ``preview``.

        Such an environment may take long until it shows the rest, or have no machine here.
        """
        kind = self.environments.kind(task)
        preview = getattr(kind.resolve(), "preview", None)
        if preview is None:
            return
        prompt = self.renderer.prompt(preview(kind.options(), task))
        self.write("\nwhat the model sees first, but for the screen, which is asked for now:")
        self.write(_indented(self.renderer.shown(prompt.token_ids)))

    def _write_prompt(self, prompt: TokenPrompt) -> None:
        size = len(prompt.token_ids)
        limit = self.episode.max_prompt_tokens
        self.write(f"\nwhat the model sees: {size} tokens (max_prompt_tokens: {limit})")
        self.write(_indented(self.renderer.shown(prompt.token_ids)))
        unshown = ", ".join(self.renderer.unshown)
        if unshown:
            self.write(
                f"the chat template shows none of the tools: {unshown}"
                " (docs/bring_your_own/tool.md)"
            )
        for number, image in enumerate((image.ref for image in prompt.images), start=1):
            width, height = self.renderer.resized(image)
            self.write(
                f"image {number}: {image.width}x{image.height} pixels, resized to {width}x{height};"
                f" grid (t, h, w) {image.grid}, {image.tokens} tokens"
            )

    def _write_truth(self, task: Task) -> None:
        if task.ground_truth is None and self.config.reward.compares:
            columns = ", ".join(task.extra) or "nothing"
            self.write(
                "truth: NONE. The reader found no answer in this row, so a reward that compares"
                " with it cannot work. ChatRows takes the column that data.reader.with.truth"
                f" names, else one of {', '.join(TRUTHS)}. Kept of the row besides: {columns}"
            )
            return
        text = "none is needed"
        if task.ground_truth is not None:
            text = json.dumps(jsonable(task.ground_truth), ensure_ascii=False)
        self.write(f"truth: {textwrap.shorten(text, SHOWN_TRUTH_CHARACTERS, placeholder=' ...')}")

    async def _outcomes(
        self, trajectories: Sequence[Trajectory], task: Task
    ) -> dict[TrajectoryId, Outcome]:
        """The rewards of the answers: one by one, or together with ``reward.per: group``."""
        # The report shows its messages in another way.
        logger = logging.getLogger("rayloop.rewards.scoring")
        was_disabled = logger.disabled
        logger.disabled = True
        try:
            outcomes = await self.reward.score(task, 0, *trajectories)
        finally:
            logger.disabled = was_disabled
        ids = [trajectory.id for trajectory in trajectories]
        return dict(zip(ids, outcomes, strict=True))

    async def _answered(
        self, number: int, result: Trajectory | BaseException, scoring: Scoring
    ) -> int:
        """Write one answer, and its reward once it is known.

        Returns 0 when it has one, else the exit code.
        """
        if isinstance(result, BaseException):
            self.write(f"\nanswer {number} could not be played")
            self._write_error(result)
            return 1

        sampled = sum(len(turn.token_ids) for turn in result.sampled_turns)
        limit = result.sampling.max_tokens
        is_cut = any(
            turn.finish is FinishReason.LENGTH and len(turn.token_ids) == limit
            for turn in result.sampled_turns
        )
        cut = f"; CUT at rollout.sampling.max_tokens={limit}" if is_cut else ""
        self.write(
            f"\nanswer {number}: {sampled} tokens sampled, the episode ended as"
            f" {result.end_reason}{cut}"
        )

        self._write_screen(number, result)
        for turn in result.turns[1:]:
            role = f"{turn.role}: " if len(result.turns) > 2 else ""
            text = NEW_CONTEXT if turn.restart else self.renderer.shown(turn.token_ids)
            self.write(_indented(role + text))

        outcomes = await scoring
        outcome = outcomes[result.id]
        self.write(rewarded(outcome))
        if outcome.trace:
            self._write_once(outcome.trace)
        if isinstance(outcome, Scored):
            return 1 if outcome.trace else 0
        return START_AGAIN_EXIT_CODE if outcome.kind is UnscoredKind.REWARD_UNAVAILABLE else 1

    def _write_screen(self, number: int, result: Trajectory) -> None:
        """Write how the first turn on a screen is read, and name a picture of where it acts."""
        options = self.environments.kind(self.task).options()
        if not isinstance(options, ScreenSettings):
            return
        self.write(f"the language is {options.language}")
        images = [image for image in result.turns[0].images if image.path is None]
        if not images:
            self.write("no picture: the policy sees no screen")
            return
        screen = images[-1]
        size = (screen.width, screen.height)
        text = self.renderer.decode(result.sampled_turns[0].token_ids)
        actions = actions_of(text, options, size)
        if isinstance(actions, Mistake):
            self.write(f"no picture: its first turn is not one of {options.language}: {actions}")
            return
        self.write(f"its first turn is read as {', '.join(map(str, actions))}")
        picture = decode(result.image_bytes[screen.sha256])
        tint = self.config.model.position_tint
        marked = drawn(untinted(picture, tint) if tint else picture, actions)
        if marked is None:
            self.write("no picture: none of these has a place")
            return
        file = Path(self.config.output) / f"{self.config.name}-try" / f"answer_{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        marked.save(file)
        self.write(f"where it acts: {file}")

    def _write_error(self, error: BaseException) -> None:
        """Write the message of a RayloopError, or the traceback of the user's own code."""
        origin = error.__cause__ if isinstance(error, EnvironmentFailed) else error
        if origin is None or isinstance(origin, RayloopError):
            self._write_once(f"{type(error).__name__}: {error}")
        else:
            self._write_once(own_frames(origin))

    def _write_once(self, text: str) -> None:
        self.write(_indented(text if text not in self.written else "the same"))
        self.written.add(text)


@contextmanager
def _making(use: str) -> Iterator[None]:
    """Raises WorkerStartFailed with the traceback of the user's own code."""
    try:
        yield
    except (RayloopError, ValidationError):
        raise
    except Exception as error:
        raise WorkerStartFailed(f"{use} could not be made:\n{own_frames(error)}") from error


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip("\n"), "    ", lambda line: True)
