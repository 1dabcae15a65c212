"""The reward actor: scores finished episodes, and tells a bad reward from a failed grader. No torch."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable
from typing import Any

from actors.base import Actor
from rayloop.chat.tokenizer import load_tokenizer, model_folder, shown
from rayloop.config.model import ModelSettings
from rayloop.core.failures import (
    ConfigError,
    DataFailure,
    DeadlineExceeded,
    InfrastructureFailure,
    RewardLost,
    WorkerSpent,
)
from rayloop.core.groups import Group, Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import RewardSource, ScoreContext
from rayloop.core.threads import hanging, in_thread
from rayloop.core.tracebacks import own_frames
from rayloop.core.types import EndReason, Task, Trajectory
from rayloop.rewards.functions import as_source
from rayloop.rewards.settings import RewardSettings
from rayloop.run.folder import RolloutRecord, rollout_record

logger = logging.getLogger(__name__)

_UNAVAILABLE = (InfrastructureFailure, OSError, MemoryError)
"""What a grader raises when something around it fails (network, disk, memory): never the policy's doing."""
TRACE = 8000
"""Characters of a traceback that travel to the driver: its end."""


class RewardActor(Actor):
    """Scores many trajectories at once: one thread each, or a coroutine when the source is asynchronous."""

    def __init__(self, model: ModelSettings, settings: RewardSettings) -> None:
        self._settings = settings
        self._tokenizer = load_tokenizer(model_folder(model.path))
        self._source: RewardSource = as_source(settings.source.build(), settings.source.use)
        self._scoring = 0

    def health(self) -> int:
        """Trajectories being scored."""
        return self._scoring

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Outcome:
        """The outcome of one trajectory, meant for training at ``step``. Takes at most twice the timeout.

        A grader that raises or hangs is asked once more, and what comes of the second failure is ``reward.on_error``'s to say.
        Failures of network, disk or memory, and all of a source that declares its exceptions ``infrastructure``, leave the
        trajectory unscored. A tool that the policy's action hung is the failing value, without asking.
        Raises RewardLost and ConfigError, with which a source ends the run, and WorkerSpent.
        """
        if (stuck := hanging()) >= self._settings.hung_threads:
            raise WorkerSpent(f"{stuck} calls of the grader hang in this process (reward.hung_threads)")
        if trajectory.end_reason is EndReason.TOOL_DEADLINE:
            return Scored(self._settings.failing_value, flags=(str(EndReason.TOOL_DEADLINE),))
        self._scoring += 1
        try:
            texts = [self._tokenizer.decode(list(turn.token_ids)) for turn in trajectory.sampled_turns]
            return await self._attempts(trajectory, task, ScoreContext(step, texts, self._settings.timeout))
        finally:
            self._scoring -= 1

    async def describe(self, group: Group, *trajectories: Trajectory) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """For the run folder: a record of each member of ``group`` (in order), and the images that travelled with them."""
        images = {sha: data for trajectory in trajectories for sha, data in trajectory.image_bytes.items()}
        pairs = zip(group.members, trajectories, strict=True)
        plain, whole = lambda ids: self._tokenizer.decode(list(ids)), lambda ids: shown(self._tokenizer, ids)
        return [rollout_record(group, member, t, plain, whole) for member, t in pairs], images

    async def _attempts(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        errors: list[Exception] = []
        while len(errors) < 2:
            try:
                return as_outcome(await self._ask(trajectory, task, context))
            except DataFailure as error:
                return Unscored(UnscoredKind.BAD_DATA, str(error))
            except (RewardLost, ConfigError):
                raise
            except Exception as error:
                logger.warning("the grader failed on trajectory %s of %s", trajectory.id, task.id, exc_info=error)
                errors.append(error)
                if isinstance(error, DeadlineExceeded) and self._settings.on_error == "exclude":
                    break  # asking again could only cost another thread
        return self._failed(errors)

    def _failed(self, errors: list[Exception]) -> Outcome:
        """What a trajectory is whose grader failed in these ways, one after the other."""
        last = errors[-1]
        infrastructure = getattr(self._source, "infrastructure", False)
        reason = f"{self._settings.source.use}: {_last_line(last)}"
        if isinstance(last, DeadlineExceeded):
            if self._settings.on_error == "fail" and not infrastructure and type(errors[0]) is type(last):
                return Scored(self._settings.failing_value, flags=("grader_timeout",))
            return Unscored(UnscoredKind.TIMEOUT, reason)
        trace = own_frames(last)[-TRACE:]
        if infrastructure or isinstance(last, _UNAVAILABLE) or type(errors[0]) is not type(last):
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, reason, trace)
        if self._settings.on_error == "fail":
            return Scored(self._settings.failing_value, flags=("grader_error",), trace=trace)
        return Unscored(UnscoredKind.GRADER_ERROR, reason, trace)

    async def _ask(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Any:
        """What the source returns. It gets a task of its own: one that it changed would be another row when it is asked again."""
        loop = asyncio.get_running_loop()
        until, task = loop.time() + self._settings.timeout, copy.deepcopy(task)
        result: Any = await in_thread(self._source.score, trajectory, task, context, timeout=self._settings.timeout)
        if not inspect.isawaitable(result):
            return result
        running = asyncio.ensure_future(_contained(result))
        done, _ = await asyncio.wait({running}, timeout=max(until - loop.time(), 0.0))
        if not done:
            running.cancel()
            raise DeadlineExceeded(f"no answer within {self._settings.timeout:g} seconds")
        if running.cancelled():  # by something inside the source: it must not look as if this call had been
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


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def as_outcome(result: Any) -> Outcome:
    """What a source returned, as an outcome: an Outcome, or whatever ``float`` makes a finite number of (a bool, a scalar of
    numpy, a tensor without dimensions); anything else, texts included, is an invalid reward.

    Components that are no finite numbers are dropped and flagged ``invalid_component``.
    """
    if isinstance(result, Unscored):
        return result
    scored = result if isinstance(result, Scored) else Scored(result)
    value = _number(scored.value)
    if value is None:
        return Unscored(
            UnscoredKind.INVALID_REWARD, f"the reward source returned {scored.value!r:.200}, not a finite number"
        )
    components = {name: number for name, given in scored.components.items() if (number := _number(given)) is not None}
    dropped = ("invalid_component",) if len(components) < len(scored.components) else ()
    return Scored(value, components, (*scored.flags, *dropped))


def _number(value: Any) -> float | None:
    """``float(value)`` if that is finite, None for all else; arrays and tensors have to be without dimensions."""
    if isinstance(value, str | bytes | bytearray) or getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
