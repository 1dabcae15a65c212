"""A chat completion as the server-sent events of ``stream: true``, in the form of OpenAI's chunks.

A run's engines answer whole turns, so nothing comes earlier than without ``stream``: it is for clients that only read streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

DONE = "data: [DONE]\n\n"
ONCE = ("prompt_token_ids", "rayloop")
"""Keys of the answer that only the first chunk has; those of vLLM are where vLLM's stream has them."""


def events(answer: Mapping[str, Any], usage: bool) -> str:
    """All events of an answer. ``usage``: the last chunk before the end has it, and no choice (``include_usage``)."""
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(answer, usage)) + DONE


def _chunks(answer: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """Two for each choice: what it says, and why it ended."""
    common = {key: value for key, value in answer.items() if key not in ("choices", "usage", *ONCE)}
    common |= {"object": "chat.completion.chunk"} | ({"usage": None} if usage else {})
    once = {key: answer[key] for key in ONCE if key in answer}
    for choice in answer["choices"]:
        message = {key: value for key, value in choice["message"].items() if value is not None}
        if "tool_calls" in message:
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        said = {key: choice[key] for key in ("index", "logprobs", "token_ids", "weight_version") if key in choice}
        yield {**common, **once, "choices": [{**said, "delta": message, "finish_reason": None}]}
        once = {}
        end = {key: choice[key] for key in ("index", "finish_reason", "stop_reason", "weight_version")}
        yield {**common, "choices": [{**end, "delta": {}, "logprobs": None}]}
    if usage:
        yield {**common, "choices": [], "usage": answer["usage"]}
