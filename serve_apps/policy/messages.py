"""OpenAI's messages as ours, and the text of a turn as OpenAI's answer: its text and its calls of tools."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Sequence
from typing import Any

from rayloop.chat.calls import bodies, without_calls, written
from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Message
from rayloop.serve_apps.policy.api import ChatMessage, Function, ToolCall
from rayloop.serve_apps.web import ImagePart, TextPart


def message_of(message: ChatMessage, calls: bool = True) -> Message:
    """With the calls as the text that a policy writes, unless without ``calls``. Raises DataFailure for an image that is none."""
    content = message.content
    parts: list[str | ImageSource] = [content] if isinstance(content, str) else [_part(part) for part in content or ()]
    if calls:
        parts += [_written(call.function) for call in message.tool_calls or ()]
    return Message("system" if message.role == "developer" else message.role, tuple(parts))


def answer_of(text: str, tools: bool) -> ChatMessage:
    """The assistant's message: with ``tools`` the calls in it are taken out of its text, unless one of them is malformed."""
    calls = _calls(text) if tools else []
    if not calls:
        return ChatMessage(role="assistant", content=text)
    return ChatMessage(role="assistant", content=without_calls(text) or None, tool_calls=calls)


def _calls(text: str) -> list[ToolCall]:
    found: list[ToolCall] = []
    for body in bodies(text):
        call: Any = None
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return []
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            return []
        arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        function = Function(name=call["name"][:256], arguments=arguments)
        found.append(ToolCall(id=f"call_{secrets.token_hex(8)}", function=function))
    return found


def _written(function: Function) -> str:
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError) as error:
        raise DataFailure("tool_calls", f"the arguments of {function.name} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise DataFailure("tool_calls", f"the arguments of {function.name} are no JSON object")
    return written(function.name, arguments)


def _part(part: TextPart | ImagePart) -> str | ImageSource:
    if isinstance(part, TextPart):
        return part.text
    _, _, data = part.image_url.url.partition(",")
    try:
        return ImageSource(data=base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise DataFailure("image_url", f"its data are no base64: {error}") from error


def images_of(messages: Sequence[ChatMessage]) -> int:
    """How many images the messages show."""
    shown = [message.content for message in messages if isinstance(message.content, list)]
    return sum(isinstance(part, ImagePart) for content in shown for part in content)
