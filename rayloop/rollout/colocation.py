"""Engines and policy ranks that use the same GPUs in turn.

``enable_sleep_mode`` in ``rollout.engine.extra`` turns it on. It is a state machine::

    ROLLOUT --engines sleep--> NOBODY --ranks wake up---> POLICY
    POLICY --ranks sleep-----> NOBODY --engines wake up-> ROLLOUT

Each call may be repeated: a switch that fails leaves the GPUs to nobody, and the next switch
repeats all its calls.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from rayloop.core.protocols import Level

T = TypeVar("T")


AwakeRole = Literal["rollout", "nobody", "policy"]
"""The role that has tensors on the GPUs."""


@dataclass(frozen=True)
class SleepCalls:
    """The calls of all engines and all ranks.

    Engines that are lost during a call are left out; a lost rank raises PolicyLost.
    """

    engines_sleep: Callable[[Level], Awaitable[object]]
    engines_wake_up: Callable[[], Awaitable[object]]
    ranks_sleep: Callable[[], Awaitable[object]]
    ranks_wake_up: Callable[[], Awaitable[object]]


class Colocation:
    """The role that is awake, and the switches between the two roles.

    With ``level`` None both roles keep their tensors, and nothing is called.
    """

    def __init__(self, level: Level | None = None, calls: SleepCalls | None = None) -> None:
        self._level: Level = level or "level1"
        self._calls = calls if level else None
        self._switching = asyncio.Lock()
        self.awake: AwakeRole = "rollout"
        self._playing = asyncio.Event()
        self._playing.set()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """A context in which an engine starts.

        It waits until the engines have the GPUs, and they keep them until its end.
        """
        while self._calls is not None:
            await self._playing.wait()
            async with self._switching:
                # Another switch may have taken the lock between the event and here.
                if self.awake == "rollout":
                    yield
                    return
        yield

    async def start_ranks(self, start: Awaitable[T]) -> T:
        """Await the start of all ranks, which have the GPUs afterwards."""
        if self._calls is None:
            return await start
        async with self._switching:
            await self._begin_switch().engines_sleep("level1")
            ranks = await start
            self._set_awake("policy")
            return ranks

    async def to_policy(self) -> None:
        """Let the ranks compute next; new weights follow, so engines may drop theirs."""
        await self._to_policy(self._level)

    async def to_rollout(self) -> None:
        """Let the engines play next. After level2 they have no weights until they load some."""
        async with self._switching:
            if self.awake != "rollout":
                calls = self._begin_switch()
                await calls.ranks_sleep()
                await calls.engines_wake_up()
                self._set_awake("rollout")

    @asynccontextmanager
    async def ranks_between(self) -> AsyncIterator[None]:
        """A context in which the ranks compute; then the engines play with the same weights.

        It switches back also after an error.
        """
        previous_role = self.awake
        await self._to_policy("level1")
        try:
            yield
        finally:
            if previous_role == "rollout":
                await self.to_rollout()

    async def _to_policy(self, level: Level) -> None:
        async with self._switching:
            if self._calls is not None and self.awake != "policy":
                calls = self._begin_switch()
                await calls.engines_sleep(level)
                await calls.ranks_wake_up()
                self._set_awake("policy")

    def _begin_switch(self) -> SleepCalls:
        assert self._calls is not None
        self._set_awake("nobody")
        return self._calls

    def _set_awake(self, awake: AwakeRole) -> None:
        self.awake = awake
        if awake == "rollout":
            self._playing.set()
        else:
            self._playing.clear()
