"""Calls of tools as the chat templates of Qwen and Hermes define them; for environments and the policy's endpoint."""

import json
import re
from collections.abc import Mapping
from typing import Any

CALL, CALLED = "<tool_call>", "</tool_call>"
"""What stands before and behind a call. ``CALLED`` belongs into ``rollout.sampling.stop``, or the policy invents the result."""
_CALL = re.compile(f"{CALL}(.*?){CALLED}", re.DOTALL)


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the policy has to write it."""
    return f"{CALL}\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n{CALLED}"


def bodies(text: str) -> list[str]:
    """What stands within each call of a text, JSON or not."""
    return _CALL.findall(text)


def without_calls(text: str) -> str:
    """The rest of a text that has calls."""
    return _CALL.sub("", text).strip()
