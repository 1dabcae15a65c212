"""The episode of an agent-driven environment: its program runs, asks the policy, and ends."""

import asyncio
import logging
from collections.abc import Awaitable
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from rayloop.chat.rendering import Renderer
from rayloop.config.explain import short
from rayloop.core.failures import (
    AgentFailed,
    DataFailure,
    EnvironmentFailed,
    EnvironmentHung,
    InfrastructureFailure,
)
from rayloop.core.types import EndReason, RolloutRequest, Trajectory
from rayloop.envs.agents.session import Generate, Session
from rayloop.envs.instance import AgentDriven
from rayloop.envs.settings import EpisodeSettings
from rayloop.rewards.functions import number

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

BODY_TOO_LARGE = "413"
"""The status of a request with more bytes than the endpoint reads.

A tool's result is in it.
"""


async def run_agent_episode(
    request: RolloutRequest,
    environment: AgentDriven,
    renderer: Renderer,
    settings: EpisodeSettings,
    generate: Generate,
) -> Trajectory:
    """Play one episode.

    An agent that ends with an error after it was refused at a limit of the episode ends it with
    that reason; one that an answer of the policy broke ends it as ``action_error`` with the
    environment's ``on_error`` as its result; any other error is the environment's. Raises
    EnvironmentFailed, EnvironmentHung, OverLongPrompt, the engine's errors.
    """
    await _blamed("__init__", environment.make(settings.step_timeout))
    session = Session(request, renderer, settings, generate, environment.model)
    reason = EndReason.DONE
    result: float | None = None
    name = f"{environment.name} of task {request.task.id}"
    try:
        async with environment.endpoint.serving(session) as address:
            result = _number(await _run_agent(environment, request, session, address))
    except EnvironmentHung as error:
        raise EnvironmentHung(f"{name}: {error}", contained=True) from error
    except EnvironmentFailed as error:
        end = _end(error, session, environment.on_error)
        if end is None:
            refusal = ""
            if session.refused:
                refusal = f"; the last request was refused: {session.refused}"
            why = f"{name}: {error}{refusal}"
            raise EnvironmentFailed(why, error.bug, error.cause, error.server) from error
        reason, result = end
        logger.warning("%s of %s ended the episode as %s: %s", name, request.id, reason, error)
    finally:
        session.close()
    return session.trajectory(reason, session.reward if session.reward is not None else result)


def _number(result: Any) -> float | None:
    """Return an agent's result. Raises AgentFailed when it is not a finite number."""
    if result is None:
        return None
    is_number = isinstance(result, Real | np.bool_) and number(result) is not None
    if not is_number:
        raise AgentFailed(f"returned {short(result, 200)}, which is not a finite number")
    return float(result)


def _end(
    error: EnvironmentFailed, session: Session, on_error: float | None
) -> tuple[EndReason, float | None] | None:
    """Return how an episode ends whose agent ended with an error, and its result.

    None for an error that is not the policy's.
    """
    if not isinstance(error, AgentFailed):
        return None
    if session.limit is not None:
        return session.limit, None
    if session.answered and session.refused.startswith(BODY_TOO_LARGE):
        return EndReason.OVER_LENGTH, None
    by_policy = error.policys and session.answered and not session.refused
    if by_policy and on_error is not None:
        return EndReason.ACTION_ERROR, on_error
    return None


async def _run_agent(
    environment: AgentDriven, request: RolloutRequest, session: Session, address: dict[str, str]
) -> Any:
    """Return what the agent returned.

    An error that makes the episode worthless ends the agent, and is raised at once.
    """
    agent = asyncio.ensure_future(
        _blamed("run_agent", environment.run_agent(request.task, address))
    )
    try:
        either: set[asyncio.Future[Any]] = {agent, session.failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if session.failed.done():
            raise session.failed.result()
        return await agent
    finally:
        # Its process must have ended before the episode is over. A late error says nothing new.
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)


async def _blamed(method: str, call: Awaitable[Result]) -> Result:
    """Return what the environment's method returns.

    An error that blames neither it nor the data is a bug of its class.
    """
    try:
        return await call
    except (EnvironmentFailed, DataFailure):
        raise
    except Exception as error:
        bug = not isinstance(error, OSError | MemoryError | InfrastructureFailure)
        raise EnvironmentFailed(f"{method} raised {type(error).__name__}: {error}", bug) from error
