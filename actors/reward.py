"""The reward actor: scores finished episodes, and never turns a failure of the grader into a
number. No torch.
"""

import asyncio
import copy
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
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
from rayloop.core.groups import Group, Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.model_files import resolve
from rayloop.core.protocols import ScoreContext
from rayloop.core.threads import in_thread, own_frames
from rayloop.core.types import UNGRADED, Ref, Task, Trajectory
from rayloop.rewards.functions import around, as_outcome, as_outcomes, as_source
from rayloop.rewards.settings import RewardSettings
from rayloop.run.folder import RolloutRecord, rollout_record

logger = logging.getLogger(__name__)

TRACE = 8000
"""Characters of a traceback that travel to the driver: its end."""


class RewardActor(Actor):
    """Scores many trajectories at once: one thread each (or per group), or a coroutine when the
    source is asynchronous.
    """

    def __init__(self, model: ModelSettings, settings: RewardSettings, trial: bool = False) -> None:
        self._settings, self._trial = settings, trial
        self._tokenizer = load_tokenizer(resolve(model.path, model.revision).folder)
        self._source: Any = as_source(settings.source.build(), settings.source.use, settings.per)
        self._around = around(self._source)
        self.rewards = 0

    def health(self) -> int:
        """Trajectories being scored."""
        return self.rewards

    async def score(self, task: Task, step: int, *trajectories: Trajectory) -> list[Outcome]:
        """The outcomes of trajectories of one task: each by itself, all at once, or together
        (``reward.per: group``).
        """
        if self._settings.per == "group":
            return await self.judge(trajectories, task, step)
        judged = await asyncio.gather(
            *(self.judge([trajectory], task, step) for trajectory in trajectories)
        )
        return [outcome for [outcome] in judged]

    async def score_those_left(
        self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int
    ) -> list[Outcome]:
        """``score`` of references to trajectories; those that are lost are ``payload_lost``."""
        # ``ray.get`` blocks, and would hold up all other scores of this event loop.
        found, gone = await asyncio.to_thread(fetch, payloads)
        there = iter(
            await self.score(task, step, *(found[ref] for ref in payloads if ref not in gone))
        )
        lost = Unscored(
            UnscoredKind.PAYLOAD_LOST, "lost with the node that held it, before it was scored"
        )
        return [lost if ref in gone else next(there) for ref in payloads]

    async def judge(
        self, trajectories: Sequence[Trajectory], task: Task, step: int
    ) -> list[Outcome]:
        """The outcomes of trajectories that are scored together for training step ``step``, within
        twice the timeout. A grader that raises or hangs is called once more; ``reward.on_error``
        decides about the second failure. Failures of network, disk or memory, and of
        ``infrastructure`` sources, leave trajectories unscored. One that the policy broke gets the
        failing value without a grader. Raises WorkerSpent, and RewardLost and ConfigError, with
        which a source ends the run.
        """
        if (stuck := threads.hanging()) >= threads.HUNG:
            raise WorkerSpent(f"{stuck} calls of the grader hang in this process")
        asked = [trajectory for trajectory in trajectories if trajectory.end_reason not in UNGRADED]
        self.rewards += len(asked)
        try:
            outcomes = iter(
                await self._attempts(asked, task, [self._context(t, step) for t in asked])
                if asked
                else ()
            )
        finally:
            self.rewards -= len(asked)
        return [
            self._broken(t) if t.end_reason in UNGRADED else next(outcomes) for t in trajectories
        ]

    def _broken(self, trajectory: Trajectory) -> Outcome:
        """The outcome of an episode that the policy broke."""
        return Scored(self._settings.failing_value, flags=(str(trajectory.end_reason),))

    async def describe(
        self, group: Group, *trajectories: Trajectory
    ) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """For the run folder: a record of each member of ``group`` (in order), and the images that
        travelled with them.
        """
        images = {
            sha: data for trajectory in trajectories for sha, data in trajectory.image_bytes.items()
        }
        pairs = zip(group.members, trajectories, strict=True)
        plain, whole = (
            lambda ids: self._tokenizer.decode(list(ids)),
            lambda ids: shown(self._tokenizer, ids),
        )
        return [rollout_record(group, member, t, plain, whole) for member, t in pairs], images

    def _context(self, trajectory: Trajectory, step: int) -> ScoreContext:
        texts = [self._tokenizer.decode(list(turn.token_ids)) for turn in trajectory.sampled_turns]
        return ScoreContext(
            step, texts, self._settings.timeout, self._transcript(trajectory), self._trial
        )

    def _transcript(self, trajectory: Trajectory) -> str | None:
        if not getattr(self._source, "transcript", False):
            return None
        _prompt, *turns = trajectory.turns
        return self._tokenizer.decode(
            [token for turn in turns for token in turn.token_ids], skip_special_tokens=False
        )

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
                if isinstance(error, DeadlineExceeded) and not self._settings.fails:
                    break  # asking again could only cost another thread
        return [self._failed(errors)] * len(trajectories)

    def _failed(self, errors: list[Exception]) -> Outcome:
        """The outcome of a trajectory whose grader failed in these ways, one after the other."""
        last = errors[-1]
        reason = f"{self._settings.source.use}: {traceback.format_exception_only(last)[-1].strip()}"
        if isinstance(last, DeadlineExceeded):
            client = bool(
                getattr(self._source, "infrastructure", False)
            )  # what it asks may have hung it
            if self._settings.fails and not client and type(errors[0]) is type(last):
                return Scored(self._settings.failing_value, flags=("grader_timeout",))
            return Unscored(UnscoredKind.TIMEOUT, reason)
        trace = own_frames(last)[-TRACE:]
        if isinstance(last, self._around) or type(errors[0]) is not type(last):
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, reason, trace)
        if self._settings.fails:
            return Scored(self._settings.failing_value, flags=("grader_error",), trace=trace)
        return Unscored(UnscoredKind.GRADER_ERROR, reason, trace)

    async def _ask(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> list[Outcome]:
        """The outcomes of copies of task and lists.

        One trajectory alone goes to ``score``, if the source has it.
        """
        # A grader may change its arguments, and the second try must get the original values.
        task, source = copy.deepcopy(task), self._source
        if len(trajectories) == 1 and hasattr(source, "score"):
            return [
                as_outcome(await self._answer(source.score, trajectories[0], task, contexts[0]))
            ]
        return as_outcomes(
            await self._answer(source.score_group, list(trajectories), task, list(contexts)),
            len(trajectories),
        )

    async def _answer(self, method: Callable[..., Any], *args: Any) -> Any:
        """The result of a plain or coroutine method.

        Raises DeadlineExceeded, and what the method raises.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.timeout
        result: Any = await in_thread(method, *args, timeout=self._settings.timeout)
        if not inspect.isawaitable(result):
            return result
        running = asyncio.ensure_future(_contained(result))
        # ``asyncio.wait`` returns at the deadline even
        # if the coroutine suppresses its cancellation.
        done, _ = await asyncio.wait({running}, timeout=max(until - loop.time(), 0.0))
        if not done:
            running.cancel()
            raise DeadlineExceeded(f"no answer within {self._settings.timeout:g} seconds")
        if running.cancelled():  # by the source itself
            raise InfrastructureFailure("the source's coroutine was cancelled from within")
        return running.result()


async def _contained(result: Awaitable[Any]) -> Any:
    """SystemExit and its like would end the actor's event loop."""
    try:
        return await result
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise RuntimeError(f"raised {type(error).__name__}: {error}") from error
