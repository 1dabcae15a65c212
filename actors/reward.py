"""The reward actor, which scores finished episodes. No torch.

It turns a failure of the grader into a number only where ``reward.on_error`` is one.
"""

import asyncio
import copy
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from rayloop.actors.base import Actor
from rayloop.actors.failures import fetch
from rayloop.chat.tokenizer import load_tokenizer, shown
from rayloop.config.model import ModelSettings
from rayloop.core import threads
from rayloop.core.failures import (
    ConfigError,
    DataFailure,
    DeadlineExceeded,
    InfrastructureFailure,
    RewardLost,
    WorkerSpent,
)
from rayloop.core.groups import Group, Outcome, Ref, Scored, Unscored, UnscoredKind
from rayloop.core.model_files import resolve
from rayloop.core.protocols import ScoreContext
from rayloop.core.threads import in_thread, own_frames
from rayloop.core.types import UNGRADED, Task, Trajectory
from rayloop.rewards.functions import as_outcome, as_outcomes, as_source, infrastructure_errors
from rayloop.rewards.settings import RewardSettings
from rayloop.run.records.rollouts import RolloutRecord, rollout_record

logger = logging.getLogger(__name__)

TRACEBACK_CHARACTERS = 8000
"""The last characters of a traceback, which travel to the driver."""


class RewardActor(Actor):
    """Scores many trajectories at once.

    Each (or each group) has a thread, or a coroutine when the source is asynchronous.
    """

    def __init__(
        self, model: ModelSettings, settings: RewardSettings, dry_run: bool = False
    ) -> None:
        self._settings = settings
        self._dry_run = dry_run
        self._tokenizer = load_tokenizer(resolve(model.path, model.revision).folder)
        self._source: Any = as_source(settings.source.build(), settings.source.use, settings.per)
        self._infrastructure_errors = infrastructure_errors(self._source)
        self.rewards = 0

    def health(self) -> int:
        """The number of trajectories that are being scored."""
        return self.rewards

    async def score(self, task: Task, step: int, *trajectories: Trajectory) -> list[Outcome]:
        """The outcomes of trajectories of one task.

        Each is scored by itself, all at once, or together (``reward.per: group``).
        """
        if self._settings.per == "group":
            return await self.score_together(trajectories, task, step)
        outcomes = await asyncio.gather(
            *(self.score_together([trajectory], task, step) for trajectory in trajectories)
        )
        return [outcome for [outcome] in outcomes]

    async def score_those_left(
        self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int
    ) -> list[Outcome]:
        """Score references to trajectories. Lost trajectories are ``payload_lost``."""
        # ``ray.get`` blocks, and would hold up all other scores of this event loop.
        values, missing = await asyncio.to_thread(fetch, payloads)
        trajectories = [values[payload] for payload in payloads if payload not in missing]
        outcomes = iter(await self.score(task, step, *trajectories))
        reason = "lost with the node that held it, before it was scored"
        payload_lost = Unscored(UnscoredKind.PAYLOAD_LOST, reason)
        return [payload_lost if payload in missing else next(outcomes) for payload in payloads]

    async def score_together(
        self, trajectories: Sequence[Trajectory], task: Task, step: int
    ) -> list[Outcome]:
        """The outcomes of trajectories that are scored together for training step ``step``.

        They arrive within twice the timeout. A grader that raises or hangs is called once more;
        ``reward.on_error`` decides about the second failure. Failures of network, disk or memory,
        and of ``infrastructure`` sources, leave trajectories unscored. A trajectory that the policy
        broke gets the failing value without a grader. Raises WorkerSpent, and RewardLost and
        ConfigError, with which a source ends the run.
        """
        hanging_calls = threads.hanging()
        if hanging_calls >= threads.MAX_HUNG_CALLS:
            raise WorkerSpent(f"{hanging_calls} calls of the grader hang in this process")
        graded = [
            trajectory for trajectory in trajectories if trajectory.end_reason not in UNGRADED
        ]
        outcomes: list[Outcome] = []
        self.rewards += len(graded)
        try:
            if graded:
                contexts = [self._context(trajectory, step) for trajectory in graded]
                outcomes = await self._attempts(graded, task, contexts)
        finally:
            self.rewards -= len(graded)
        scores = iter(outcomes)
        return [
            self._broken(trajectory) if trajectory.end_reason in UNGRADED else next(scores)
            for trajectory in trajectories
        ]

    def _broken(self, trajectory: Trajectory) -> Outcome:
        """The outcome of an episode that the policy broke."""
        return Scored(self._settings.failing_value, flags=(str(trajectory.end_reason),))

    async def describe(
        self, group: Group, *trajectories: Trajectory
    ) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """A record of each member of ``group`` (in order), and the images that travelled with them.

        They are for the run folder.
        """
        images: dict[str, bytes] = {}
        for trajectory in trajectories:
            images.update(trajectory.image_bytes)

        def decode(ids: Sequence[int]) -> str:
            return self._tokenizer.decode(list(ids))

        decode_all = partial(shown, self._tokenizer)
        records = [
            rollout_record(group, member, trajectory, decode, decode_all)
            for member, trajectory in zip(group.members, trajectories, strict=True)
        ]
        return records, images

    def _context(self, trajectory: Trajectory, step: int) -> ScoreContext:
        texts = [self._tokenizer.decode(list(turn.token_ids)) for turn in trajectory.sampled_turns]
        transcript = self._transcript(trajectory)
        return ScoreContext(step, texts, self._settings.timeout, transcript, self._dry_run)

    def _transcript(self, trajectory: Trajectory) -> str | None:
        if not getattr(self._source, "transcript", False):
            return None
        _prompt, *turns = trajectory.turns
        token_ids = list(chain.from_iterable(turn.token_ids for turn in turns))
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    async def _attempts(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> list[Outcome]:
        errors: list[Exception] = []
        while len(errors) < 2:
            try:
                return await self._ask(trajectories, task, contexts)
            except DataFailure as error:
                return [Unscored(UnscoredKind.BAD_DATA, str(error))] * len(trajectories)
            except (RewardLost, ConfigError):
                raise
            except Exception as error:
                ids = ", ".join(str(trajectory.id) for trajectory in trajectories)
                logger.warning("the grader failed on %s of task %s", ids, task.id, exc_info=error)
                errors.append(error)
                # A second call would not change the outcome, and could hang another thread.
                if isinstance(error, DeadlineExceeded) and not self._settings.scores_failures:
                    break
        return [self._failed(errors)] * len(trajectories)

    def _failed(self, errors: list[Exception]) -> Outcome:
        """The outcome of a trajectory whose grader failed in these ways, one after the other."""
        last = errors[-1]
        last_line = traceback.format_exception_only(last)[-1].strip()
        reason = f"{self._settings.source.use}: {last_line}"
        if isinstance(last, DeadlineExceeded):
            # A source that asks a service may hang because of the service.
            asks_service = getattr(self._source, "infrastructure", False)
            scores_failure = self._settings.scores_failures and not asks_service
            if scores_failure and type(errors[0]) is type(last):
                return Scored(self._settings.failing_value, flags=("grader_timeout",))
            return Unscored(UnscoredKind.TIMEOUT, reason)
        trace = own_frames(last)[-TRACEBACK_CHARACTERS:]
        if isinstance(last, self._infrastructure_errors) or type(errors[0]) is not type(last):
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, reason, trace)
        if self._settings.scores_failures:
            return Scored(self._settings.failing_value, flags=("grader_error",), trace=trace)
        return Unscored(UnscoredKind.GRADER_ERROR, reason, trace)

    async def _ask(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> list[Outcome]:
        """The outcomes of copies of task and lists.

        A single trajectory goes to ``score``, if the source has it.
        """
        # A grader may change its arguments, and the second try must get the original values.
        task = copy.deepcopy(task)
        source = self._source
        if len(trajectories) == 1 and hasattr(source, "score"):
            answer = await self._answer(source.score, trajectories[0], task, contexts[0])
            return [as_outcome(answer)]
        answer = await self._answer(source.score_group, list(trajectories), task, list(contexts))
        return as_outcomes(answer, len(trajectories))

    async def _answer(self, method: Callable[..., Any], *args: Any) -> Any:
        """The result of a plain or coroutine method.

        Raises DeadlineExceeded, and what the method raises.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.timeout
        result: Any = await in_thread(method, *args, timeout=self._settings.timeout)
        if not inspect.isawaitable(result):
            return result
        running = asyncio.ensure_future(_contained(result))
        # ``asyncio.wait`` returns at the deadline even
        # if the coroutine suppresses its cancellation.
        finished, _ = await asyncio.wait({running}, timeout=max(deadline - loop.time(), 0.0))
        if not finished:
            running.cancel()
            raise DeadlineExceeded(f"no answer within {self._settings.timeout:g} seconds")
        # The source itself may cancel it.
        if running.cancelled():
            raise InfrastructureFailure("the source's coroutine was cancelled from within")
        return running.result()


async def _contained(result: Awaitable[Any]) -> Any:
    """Await ``result``, and raise SystemExit and its like as RuntimeError.

    They would end the actor's event loop.
    """
    try:
        return await result
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise RuntimeError(f"raised {type(error).__name__}: {error}") from error
