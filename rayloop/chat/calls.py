"""Calls of tools as the chat templates of Qwen and Hermes define them; for environments and the
policy's endpoint.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

CALL, CALLED = "<tool_call>", "</tool_call>"
"""What stands before and behind a call.

``CALLED`` belongs into ``rollout.sampling.stop``, or the policy invents the result.
"""


class Enclosed:
    """The pattern ``opening(.*?)closing`` with DOTALL, in time that is linear in the text, where
    ``re`` needs the square of it for openings without an end. Both are regular expressions, the way
    of which to match does not depend on what follows.
    """

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
        """Where each begins, with its opening and behind it, and ends, before its closing and with
        it.
        """
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


def called(body: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of what stands within a call; arguments that are JSON in a text, as some
    templates write them, are read. Raises ValueError, in words for the policy, also for halves of
    characters, which nothing else takes.
    """
    try:
        call = json.loads(body)
        json.dumps(call, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tool call is not valid JSON: {error}") from error
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        raise ValueError('a tool call must look like {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        _, arguments = called(f'{{"name": "", "arguments": {arguments}}}')
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a tool call must be an object")
    return call["name"], arguments
