"""Calls of a reward source: a deadline, a second try, and what a failure means.

No torch, no ray: reward actors score with it, and ``replay`` once more.
"""

import asyncio
import copy
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from rayloop.core import threads
from rayloop.core.failures import (
    ConfigError,
    DataFailure,
    DeadlineExceeded,
    InfrastructureFailure,
    RewardLost,
    WorkerSpent,
)
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.threads import in_thread, own_frames
from rayloop.core.types import UNGRADED, Task, Trajectory
from rayloop.rewards.functions import as_outcome, as_outcomes, as_source, infrastructure_errors
from rayloop.rewards.settings import RewardSettings
from rayloop.rewards.verdicts import VERDICTS, Verdicts

logger = logging.getLogger(__name__)

TRACEBACK_CHARACTERS = 8000
"""The last characters of a traceback, which travel to the driver."""


class RewardScoring:
    """The configured reward source and the treatment of its failures.

    ``running``: trajectories that are being scored.
    """

    def __init__(self, settings: RewardSettings) -> None:
        """Build the source. Raises ConfigError, pydantic.ValidationError."""
        self._settings = settings
        self.source: Any = as_source(settings.source.build(), settings.source.use, settings.per)
        self._infrastructure_errors = infrastructure_errors(self.source)
        self.running = 0

    async def score_together(
        self,
        trajectories: Sequence[Trajectory],
        task: Task,
        contexts: Sequence[ScoreContext],
        verdicts: Verdicts | None = None,
    ) -> list[Outcome]:
        """The outcomes of trajectories that are scored together, each with its context.

        ``verdicts``: saved ones that stand for the judge's. Outcomes arrive within twice the
        timeout. A grader that raises or hangs is called once more; ``reward.on_error`` decides
        about the second failure. Failures of network, disk or memory, and of ``infrastructure``
        sources, leave trajectories unscored. A trajectory that the policy broke gets the failing
        value without a grader. Raises WorkerSpent, and RewardLost and ConfigError, with which a
        source ends the run.
        """
        hanging_calls = threads.hanging()
        if hanging_calls >= threads.MAX_HUNG_CALLS:
            raise WorkerSpent(f"{hanging_calls} calls of the grader hang in this process")
        graded: list[Trajectory] = []
        graded_contexts: list[ScoreContext] = []
        for trajectory, context in zip(trajectories, contexts, strict=True):
            if trajectory.end_reason not in UNGRADED:
                graded.append(trajectory)
                graded_contexts.append(context)
        outcomes: list[Outcome] = []
        self.running += len(graded)
        try:
            if graded:
                outcomes = await self._attempts(graded, task, graded_contexts, verdicts)
        finally:
            self.running -= len(graded)
        scores = iter(outcomes)
        return [
            broken(one, self._settings) if one.end_reason in UNGRADED else next(scores)
            for one in trajectories
        ]

    async def _attempts(
        self,
        trajectories: Sequence[Trajectory],
        task: Task,
        contexts: Sequence[ScoreContext],
        verdicts: Verdicts | None = None,
    ) -> list[Outcome]:
        errors: list[Exception] = []
        while len(errors) < 2:
            try:
                return await self._ask(trajectories, task, contexts, verdicts or Verdicts())
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
            asks_service = getattr(self.source, "infrastructure", False)
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
        self,
        trajectories: Sequence[Trajectory],
        task: Task,
        contexts: Sequence[ScoreContext],
        verdicts: Verdicts,
    ) -> list[Outcome]:
        """The outcomes of copies of task and lists.

        A single trajectory goes to ``score``, if the source has it.
        """
        # A grader may change its arguments, and the second try must get the original values.
        task = copy.deepcopy(task)
        # Each call runs in a task of its own, so the variable has its verdicts alone.
        VERDICTS.set(verdicts)
        source = self.source
        if len(trajectories) == 1 and hasattr(source, "score"):
            answer = await self._answer(source.score, trajectories[0], task, contexts[0])
            outcomes = [as_outcome(answer)]
        else:
            method = source.score_group
            answer = await self._answer(method, list(trajectories), task, list(contexts))
            outcomes = as_outcomes(answer, len(trajectories))
        return [_with_verdicts(outcome, verdicts) for outcome in outcomes]

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


def broken(trajectory: Trajectory, settings: RewardSettings) -> Outcome:
    """The outcome of an episode that the policy broke: its end is one of ``UNGRADED``."""
    return Scored(settings.failing_value, flags=(str(trajectory.end_reason),))


def _with_verdicts(outcome: Outcome, verdicts: Verdicts) -> Outcome:
    if isinstance(outcome, Unscored) or not verdicts.all:
        return outcome
    return replace(outcome, verdicts=verdicts.all)


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
