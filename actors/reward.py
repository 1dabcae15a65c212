"""The reward actor: scores finished episodes, and tells a bad reward from a failed grader. No torch."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from numbers import Real
from typing import Any

from actors.base import Actor
from actors.settings import RewardSettings
from rayloop.core.failures import ConfigError, DataFailure, DeadlineExceeded, InfrastructureFailure, RewardLost
from rayloop.core.model import ModelSettings
from rayloop.core.protocols import RewardSource, ScoreContext
from rayloop.core.runfolder import RolloutRecord, rollout_record
from rayloop.core.threads import in_thread
from rayloop.core.types import Group, Outcome, Scored, Task, Trajectory, Unscored, UnscoredKind
from rayloop.envs.rendering import load_tokenizer, model_folder

logger = logging.getLogger(__name__)

_UNAVAILABLE = (InfrastructureFailure, OSError, MemoryError)
"""What a grader raises when something around it fails (network, disk, memory): never the policy's doing."""


class RewardActor(Actor):
    """Scores many trajectories at once: one thread each, or a coroutine when the source is asynchronous."""

    def __init__(self, model: ModelSettings, settings: RewardSettings) -> None:
        self._settings = settings
        self._tokenizer = load_tokenizer(model_folder(model.path))
        self._source: RewardSource = settings.source.build()
        self._scoring = 0

    def health(self) -> int:
        """Trajectories being scored."""
        return self._scoring

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Outcome:
        """The outcome of one trajectory, meant for training at ``step``. Takes at most twice the timeout.

        A grader that raises is asked once more. When the same input makes it raise again, the policy's text broke it:
        the failing value, flagged ``grader_error``. Failures of network, disk or memory leave the trajectory unscored.
        Raises only RewardLost and ConfigError, with which a source ends the run.
        """
        self._scoring += 1
        try:
            texts = [self._tokenizer.decode(list(turn.token_ids)) for turn in trajectory.sampled_turns]
            return await self._attempts(trajectory, task, ScoreContext(step, texts, self._settings.timeout))
        finally:
            self._scoring -= 1

    def describe(self, group: Group, *trajectories: Trajectory) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """For the run folder: a record of each member of ``group`` (in order), and the images that travelled with them."""
        images = {sha: data for trajectory in trajectories for sha, data in trajectory.image_bytes.items()}
        pairs = zip(group.members, trajectories, strict=True)
        return [rollout_record(group, member, t, lambda ids: self._tokenizer.decode(list(ids))) for member, t in pairs], images

    async def _attempts(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        errors: list[Exception] = []
        while len(errors) < 2:
            try:
                return as_outcome(await self._ask(trajectory, task, context))
            except DeadlineExceeded as error:
                return Unscored(UnscoredKind.TIMEOUT, f"{self._settings.source.use}: {error}")
            except DataFailure as error:
                return Unscored(UnscoredKind.BAD_DATA, str(error))
            except (RewardLost, ConfigError):
                raise
            except Exception as error:
                logger.warning("the grader failed on trajectory %s of %s", trajectory.id, task.id, exc_info=error)
                errors.append(error)
        first, second = errors
        if isinstance(second, _UNAVAILABLE) or type(first) is not type(second):
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, f"{type(second).__name__}: {second}")
        return Scored(self._settings.failing_value, flags=("grader_error",))

    async def _ask(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Any:
        timeout = self._settings.timeout
        result: Any = await in_thread(self._source.score, trajectory, task, context, timeout=timeout)
        if not inspect.isawaitable(result):
            return result
        running = asyncio.ensure_future(result)
        done, _ = await asyncio.wait({running}, timeout=timeout)
        if not done:
            running.cancel()
            raise DeadlineExceeded(f"no answer within {timeout:g} seconds")
        return running.result()


def as_outcome(result: Any) -> Outcome:
    """What a source returned, as an outcome: an Outcome or a finite number; anything else is an invalid reward.

    Components that are no finite numbers are dropped and flagged ``invalid_component``.
    """
    if isinstance(result, Unscored):
        return result
    scored = result if isinstance(result, Scored) else Scored(result)
    if not _finite(scored.value):
        return Unscored(UnscoredKind.INVALID_REWARD, f"the reward source returned {result!r}, not a finite number")
    components = {name: float(value) for name, value in scored.components.items() if _finite(value)}
    dropped = ("invalid_component",) if len(components) < len(scored.components) else ()
    return Scored(float(scored.value), components, (*scored.flags, *dropped))


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
