"""The episode of an environment that leads it: its program runs, asks the policy, and ends."""

import asyncio
import logging
from collections.abc import Awaitable
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from rayloop.chat.rendering import Renderer
from rayloop.config.explain import short
from rayloop.core.failures import AgentFailed, DataFailure, EnvironmentFailed, EnvironmentHung, InfrastructureFailure
from rayloop.core.types import EndReason, RolloutRequest, Trajectory
from rayloop.envs.agents.session import Generate, Session
from rayloop.envs.instance import Leading
from rayloop.envs.settings import EpisodeSettings
from rayloop.rewards.functions import number

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


async def play_led(
    request: RolloutRequest, environment: Leading, renderer: Renderer, settings: EpisodeSettings, generate: Generate
) -> Trajectory:
    """Play one episode. An agent that ends with an error after it was refused at a limit of the episode ends it with that reason;
    any other error is the environment's. Raises EnvironmentFailed, EnvironmentHung, OverLongPrompt, the engine's errors."""
    await _blamed("__init__", environment.make(settings.step_timeout))
    session = Session(request, renderer, settings, generate, environment.model)
    reason = EndReason.DONE
    what = f"{environment.name} of task {request.task.id}"
    try:
        async with environment.endpoint.serving(session) as address:
            result = await _led(environment, request, session, address)
    except EnvironmentHung as error:
        raise EnvironmentHung(f"{what}: {error}", contained=True) from error
    except EnvironmentFailed as error:
        if session.limit is None or not isinstance(error, AgentFailed):
            said = f"; the last request was refused: {session.refused}" if session.refused else ""
            raise EnvironmentFailed(f"{what}: {error}{said}", error.bug) from error
        logger.info("%s: %s, after a limit: %s", request.id, error, session.refused)
        result, reason = None, session.limit
    finally:
        session.close()
    if result is not None and not (isinstance(result, Real | np.bool_) and number(result) is not None):
        raise EnvironmentFailed(f"{what} returned {short(result, 200)}, which is no finite number", bug=True)
    return session.trajectory(reason, session.reward if session.reward is not None or result is None else float(result))


async def _led(environment: Leading, request: RolloutRequest, session: Session, address: dict[str, str]) -> Any:
    """What the agent returned. Raises at once what makes the episode worthless, and ends the agent then."""
    agent = asyncio.ensure_future(_blamed("lead", environment.lead(request.task, address)))
    try:
        either: set[asyncio.Future[Any]] = {agent, session.failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if session.failed.done():
            raise session.failed.result()
        return await agent
    finally:
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)


async def _blamed(method: str, call: Awaitable[Result]) -> Result:
    """What the environment's method returns. An error that blames neither it nor the data is a bug of its class."""
    try:
        return await call
    except (EnvironmentFailed, DataFailure):
        raise
    except Exception as error:
        bug = not isinstance(error, OSError | MemoryError | InfrastructureFailure)
        raise EnvironmentFailed(f"{method} raised {type(error).__name__}: {error}", bug) from error
