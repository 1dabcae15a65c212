"""Tool calls as the chat templates of Qwen and Hermes define them.

Environments and the policy's endpoint use them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

CALL = "<tool_call>"
"""The text before a call."""
CALLED = "</tool_call>"
"""The text after a call.

It must be in ``rollout.sampling.stop``, or the policy invents the result.
"""


class Enclosed:
    """The pattern ``opening(.*?)closing`` with DOTALL, in linear time.

    ``re`` takes quadratic time for openings without an end. Both are regular expressions whose
    match does not depend on the text after it.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = re.compile(opening)
        self._closing = re.compile(closing)

    def findall(self, text: str) -> list[str]:
        """The text inside each match."""
        return [text[opening.end() : closing.start()] for opening, closing in self._matches(text)]

    def removed(self, text: str) -> str:
        """The text without its matches."""
        parts = []
        position = 0
        for opening, closing in self._matches(text):
            parts.append(text[position : opening.start()])
            position = closing.end()
        parts.append(text[position:])
        return "".join(parts)

    def _matches(self, text: str) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
        """The opening and the closing of each match."""
        position = 0
        while True:
            opening = self._opening.search(text, position)
            if opening is None:
                return
            closing = self._closing.search(text, opening.end())
            if closing is None:
                # No later opening has a closing either.
                return
            yield opening, closing
            position = closing.end()


def tagged(tag: str) -> Enclosed:
    """The pattern ``<tag>(.*?)</tag>``."""
    return Enclosed(f"<{re.escape(tag)}>", f"</{re.escape(tag)}>")


_CALL = Enclosed(CALL, CALLED)


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in the form in which the policy must write it."""
    body = json.dumps({"name": name, "arguments": dict(arguments)})
    return f"{CALL}\n{body}\n{CALLED}"


def bodies(text: str) -> list[str]:
    """The text inside each call, JSON or not."""
    return _CALL.findall(text)


def without_calls(text: str) -> str:
    """The rest of a text that has calls."""
    return _CALL.removed(text).strip()


def called(body: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of the call with this body.

    Arguments that are JSON in a text, as some templates write them, are parsed. Raises ValueError,
    in words for the policy, also for lone surrogates, which cannot be encoded.
    """
    try:
        call = json.loads(body)
        # Raises UnicodeEncodeError, which is a ValueError, for lone surrogates.
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
