"""The first prompt that the episodes of one call share is rendered once; the other episodes wait for the same result."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rayloop.chat.rendering import Rendered, Renderer
from rayloop.core.threads import asked, settle, start, within
from rayloop.core.types import Message

_Shown = tuple[tuple[Message, ...], list[Mapping[str, Any]]]


class FirstPrompts:
    """The prompts of one call. An episode that shows something else is rendered by itself."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._rendered: list[tuple[_Shown, Future[Rendered], threading.Thread]] = []

    async def of(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], timeout: float) -> Rendered:
        """``Renderer.prompt`` in a thread, awaited for at most ``timeout`` seconds by each caller. Raises as it does, and
        DeadlineExceeded."""
        shown = tuple(messages), list(tools)
        for other, answer, thread in self._rendered:
            if other == shown:
                return await within(timeout, answer, thread)
        answer = asked()
        thread = start(lambda: settle(answer, lambda: self._renderer.prompt(*shown)))
        self._rendered.append((shown, answer, thread))
        return await within(timeout, answer, thread)
