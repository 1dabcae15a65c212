"""Conversion between OpenAI's messages and ours, with images and calls of tools."""

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
from rayloop.serve_apps.policy.api import CalledFunction, ChatMessage, ToolCall
from rayloop.serve_apps.web import ImagePart, TextPart


def message_of(message: ChatMessage, calls: bool = True) -> Message:
    """The message in our form; with ``calls`` its calls of tools are the text that a policy writes for them.

    Raises DataFailure for an image that is no base64, or arguments that are no JSON object.
    """
    content = message.content
    parts: list[str | ImageSource] = [content] if isinstance(content, str) else [_part(part) for part in content or ()]
    if calls:
        parts += [_written(call.function) for call in message.tool_calls or ()]
    return Message("system" if message.role == "developer" else message.role, tuple(parts))


def answer_of(text: str, tools: bool) -> ChatMessage:
    """The assistant's message. With ``tools`` its calls are taken out of the text, unless one of them is malformed."""
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
        function = CalledFunction(name=call["name"][:256], arguments=arguments)
        found.append(ToolCall(id=f"call_{secrets.token_hex(8)}", function=function))
    return found


def _written(function: CalledFunction) -> str:
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
    """The number of images in the messages."""
    shown = [message.content for message in messages if isinstance(message.content, list)]
    return sum(isinstance(part, ImagePart) for content in shown for part in content)
