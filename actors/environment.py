"""The environment actor: plays episodes, many at once, on its event loop. No torch."""

import asyncio
import contextlib
import copy
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from rayloop.actors.base import Actor
from rayloop.actors.failures import cause
from rayloop.actors.handles import Handle
from rayloop.actors.images import SentImages
from rayloop.actors.lease import Engine, FirstTurn, Lease, LeasedEngine, LeasesEngines
from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.config.settings import Component
from rayloop.core import threads
from rayloop.core.deadlines import bounded
from rayloop.core.failures import (
    Cause,
    DataFailure,
    Diverged,
    EnvironmentFailed,
    EnvironmentHung,
    Failure,
    InfrastructureFailure,
    OverLongPrompt,
    Scope,
    WorkerSpent,
)
from rayloop.core.threads import hanging
from rayloop.core.types import RolloutRequest, Summary, Trajectory
from rayloop.envs.episode import FirstPrompts, run_episode, summarize
from rayloop.envs.instance import Environments
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings

logger = logging.getLogger(__name__)

REQUEST_SHARE = 1 / 6
"""The share of ``environment.episode_timeout`` that one generation request may take.

After that the engine counts as lost.
"""


class EnvironmentActor(Actor):
    """Plays episodes on the engine of a lease.

    It gets another lease from the driver when that engine is lost.
    """

    def __init__(
        self,
        model: ModelSettings,
        episode: EpisodeSettings,
        kinds: Mapping[str, EnvironmentKind] | None = None,
        timeout: float = 3600.0,
        at_once: int | None = None,
        history: Component | None = None,
    ) -> None:
        """Make the renderer and the environments.

        ``timeout``: seconds for a whole episode, from when there is room for it; ``at_once``: how
        many are played at once, None for all (``environment.*``).
        """
        self._settings = episode
        self._renderer = Renderer(model)
        all_kinds = (episode.environment, *(kinds or {}).values())
        # Settings that cannot be read end the constructor here, and not the first episode.
        for kind in all_kinds:
            kind.options()
        self._agent_driven = any(kind.agent_driven for kind in all_kinds)
        self._environments = Environments(episode.environment, kinds or {}, history)
        self._timeout = timeout
        self._room = asyncio.Semaphore(at_once) if at_once else contextlib.nullcontext()
        self._images = SentImages()
        self._running = 0
        self._engines: set[LeasedEngine] = set()

    def health(self) -> int:
        """The number of episodes that are being played."""
        return self._running

    @ray.method(concurrency_group="debug")
    def awaits(self) -> list[tuple[str, Any]]:
        """How many episodes wait for each engine, and how many for their environment."""
        engines = list(self._engines)
        leases = [engine.lease for engine in engines if engine.generates]
        counts = Counter(lease.slot for lease in leases)
        handles = {lease.slot: lease.handle for lease in leases}
        waits: list[tuple[str, Any]] = [
            (f"{count} generate on rollout {slot}", handles[slot])
            for slot, count in sorted(counts.items())
        ]
        in_environment = len(engines) - len(leases)
        if in_environment:
            waits.append((f"{in_environment} are in their environment", None))
        return waits

    async def run_episodes(
        self,
        requests: Sequence[RolloutRequest],
        lease: Lease[Engine],
        driver: Handle[LeasesEngines],
    ) -> tuple[list[Summary | Failure], *tuple[Trajectory | None, ...]]:
        """Run n episodes of a group at once, on one engine.

        Call it with ``num_returns`` 1 + n: it returns their results, then their payloads. A failure
        has no payload. Takes an episode's timeout and ``CLOSE_TIMEOUT_S`` at most, and the same
        once more for every ``at_once`` episodes that were here before. Raises WorkerSpent at once.
        """
        hanging_calls = hanging()
        if hanging_calls >= threads.MAX_HUNG_CALLS:
            raise WorkerSpent(f"{hanging_calls} calls of tools hang in this process")
        single_turn = self._for(requests[0]).max_turns == 1 and not self._agent_driven
        first_turn: FirstTurn | None = None
        if len(requests) > 1 and single_turn:
            first_turn = FirstTurn(len(requests), self._images)
        timeout = self._timeout * REQUEST_SHARE
        engines = [
            LeasedEngine(request, lease, driver, timeout, self._images, first_turn)
            for request in requests
        ]
        prompts = FirstPrompts(self._renderer)
        episodes = (
            self._episode(_own(request), engine, prompts)
            for request, engine in zip(requests, engines, strict=True)
        )
        results = await asyncio.gather(*episodes)
        heads = [head for head, _ in results]
        return heads, *(trajectory for _, trajectory in results)

    def _for(self, request: RolloutRequest) -> EpisodeSettings:
        return self._settings.model_copy(update=request.episode)

    async def _episode(
        self, request: RolloutRequest, engine: LeasedEngine, prompts: FirstPrompts
    ) -> tuple[Summary | Failure, Trajectory | None]:
        self._running += 1
        self._engines.add(engine)
        try:
            environment = self._environments.of(request.task)
            timeout_error = EnvironmentHung(
                f"the episode did not end within {self._timeout:g} s", environment.contained
            )

            # The time begins with the room: an episode that waited for other episodes has not
            # hung. The wait ends, since each of these has a deadline.
            async with self._room:
                engine.begins()
                began = time.monotonic()
                running = run_episode(
                    request,
                    environment,
                    self._renderer,
                    self._for(request),
                    engine.generate,
                    prompts,
                    self._environments.history(request.task),
                )
                trajectory = await bounded(self._timeout, running, timeout_error)
                seconds = time.monotonic() - began
            summary = summarize(trajectory, request.task, seconds, self._renderer.image_token)
            return replace(summary, sent=engine.sent), trajectory
        except Exception as error:
            # A value, so that one failure does not cost the results of its group.
            return _failed(request, error), None
        finally:
            self._running -= 1
            self._engines.discard(engine)
            engine.leave()


def _own(request: RolloutRequest) -> RolloutRequest:
    """The request with a copy of its task's values, so that episodes do not share them.

    Messages cannot be changed.
    """
    task = request.task
    ground_truth = copy.deepcopy(task.ground_truth)
    extra = copy.deepcopy(task.extra)
    return replace(request, task=replace(task, ground_truth=ground_truth, extra=extra))


def classify(raised: BaseException) -> Failure:
    """An error of an episode as a value: made here, where it is known whose code raised it."""
    error = cause(raised)
    match error:
        case DataFailure():
            # The error of an engine comes wrapped.
            scope = Scope.EPISODE if error is raised else Scope.ENGINE
            return Failure(Cause.BAD_DATA, scope, retryable=True, why=error.reason, path=error.path)
        case Diverged():
            return Failure(Cause.DIVERGED, Scope.ENGINE, retryable=False, why=str(error))
        case OverLongPrompt():
            return Failure(
                Cause.OVER_LONG,
                Scope.ENGINE,
                retryable=False,
                why=f"{error} (environment.episode.max_prompt_tokens)",
            )
        case EnvironmentHung():
            scope = Scope.EPISODE if error.contained else Scope.PROCESS
            return Failure(Cause.HUNG, scope, retryable=True, why=str(error))
        case EnvironmentFailed():
            return Failure(
                error.cause,
                Scope.EPISODE,
                retryable=not error.bug,
                why=str(error),
                server=error.server,
            )
    return Failure(
        Cause.RAISED, Scope.ENGINE, retryable=True, why=f"{type(error).__name__}: {error}"
    )


def _failed(request: RolloutRequest, raised: BaseException) -> Failure:
    """The failure of an episode.

    Unforeseen errors, and errors of environments, are logged with their traceback.
    """
    error = cause(raised)
    failure = classify(raised)
    is_foreseen = isinstance(error, InfrastructureFailure | DataFailure | OverLongPrompt)
    if isinstance(error, EnvironmentFailed) or not is_foreseen:
        logger.error("episode %s of task %s failed", request.id, request.task.id, exc_info=error)
    return failure
