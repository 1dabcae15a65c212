"""Calls of tools as the chat templates of Qwen and Hermes define them; for environments and the policy's endpoint."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

CALL, CALLED = "<tool_call>", "</tool_call>"
"""What stands before and behind a call. ``CALLED`` belongs into ``rollout.sampling.stop``, or the policy invents the result."""


class Enclosed:
    """The pattern ``opening(.*?)closing`` with DOTALL, in time that is linear in the text, where ``re`` needs the square of it for
    openings without an end. Both are regular expressions, the way of which to match does not depend on what follows."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = re.compile(opening), re.compile(closing)

    def findall(self, text: str) -> list[str]:
        """What stands within each."""
        return [text[begin:end] for _, begin, end, _ in self._places(text)]

    def removed(self, text: str) -> str:
        """The text without them."""
        kept, at = list[str](), 0
        for outer, _, _, end in self._places(text):
            kept.append(text[at:outer])
            at = end
        return "".join([*kept, text[at:]])

    def _places(self, text: str) -> Iterator[tuple[int, int, int, int]]:
        """Where each begins, with its opening and behind it, and ends, before its closing and with it."""
        at = 0
        while begin := self._opening.search(text, at):
            end = self._closing.search(text, begin.end())
            if end is None:
                return  # nor has a later one an end
            at = end.end()
            yield begin.start(), begin.end(), end.start(), at


def tagged(tag: str) -> Enclosed:
    """``<tag>(.*?)</tag>``."""
    return Enclosed(f"<{re.escape(tag)}>", f"</{re.escape(tag)}>")


_CALL = Enclosed(CALL, CALLED)


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the policy has to write it."""
    return f"{CALL}\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n{CALLED}"


def bodies(text: str) -> list[str]:
    """What stands within each call of a text, JSON or not."""
    return _CALL.findall(text)


def without_calls(text: str) -> str:
    """The rest of a text that has calls."""
    return _CALL.removed(text).strip()
