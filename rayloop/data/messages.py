"""The messages of a row in the forms of OpenAI, TRL, verl and ``datasets``.

They have texts, images and tool calls.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rayloop.config.explain import short
from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Message
from rayloop.data.rows import parsed

PLACEHOLDER = "<image>"
"""Where an image goes inside a text, in verl's and TRL's datasets."""
ENCODED = ("iVBORw0KGgo", "/9j/", "UklGR")
"""How PNG, JPEG and WebP begin in base64."""
_MAX_PATH_CHARACTERS = 4096
"""The most characters of a path on Linux."""

Pieces = list[str | ImageSource | None]
"""A message's content in reading order; None is a place for the next of the row's images."""


def blank(value: Any) -> bool:
    """Whether a value has no content: null, NaN or a text of white space."""
    return (
        value is None
        or (isinstance(value, float) and value != value)
        or (isinstance(value, str) and not value.strip())
    )


def field(row: Mapping[str, Any], name: str, where: str) -> Any:
    """A required, non-empty field of a row. Raises DataFailure."""
    value = row.get(name)
    if blank(value) or value == []:
        raise DataFailure(where, f"the field {name!r} is missing or empty")
    return value


def image_entry(entry: Any, where: str, root: Path) -> ImageSource:
    """An image column's entry as an image.

    It is a path (relative to ``root`` unless absolute), a data URL, base64 or bytes, also in a
    mapping as ``image``, ``path`` or ``bytes``. Raises DataFailure for anything else, URLs
    included: nothing is downloaded.
    """
    value: Any = entry
    if isinstance(entry, Mapping):
        # ``datasets`` stores an Image within messages in this form.
        if isinstance(entry.get("image"), Mapping):
            return image_entry(entry["image"], where, root)
        values = (entry.get(key) for key in ("bytes", "image", "path"))
        value = next((candidate for candidate in values if candidate is not None), None)
        # JSON has no bytes, so that datasets' ``bytes`` become base64 there.
        if isinstance(value, str) and entry.get("bytes") is not None:
            return ImageSource(data=_decoded(value, where))
    if isinstance(value, bytes):
        return ImageSource(data=value)
    if not isinstance(value, str) or not value:
        expected = "a path, a data URL, {image: path}, {path: ...} or {bytes: ...}"
        raise DataFailure(where, f"an image must be {expected}, found {short(entry)}")
    is_base64 = value.startswith(ENCODED) and re.fullmatch(r"[\w+/=\s-]{100,}", value)
    if is_base64 or value.startswith("data:"):
        return ImageSource(data=_decoded(value, where))
    if re.match("https?://", value):
        raise DataFailure(
            where,
            f"images are not downloaded: {short(value)}. Save it with the data and give its path",
        )
    if len(value) > _MAX_PATH_CHARACTERS:
        raise DataFailure(where, f"a path of {len(value)} characters: {short(value)}")
    return ImageSource(path=str(root / value.removeprefix("file://")))


def _decoded(text: str, where: str) -> bytes:
    """The bytes of base64 text, line breaks allowed, or of a data URL. Raises DataFailure."""
    head, _, body = text.partition(",") if text.startswith("data:") else ("base64", "", text)
    try:
        if not head.endswith("base64"):
            raise ValueError("a data URL must end in ;base64 before the comma")
        # Without validate, Python skips foreign characters and returns other bytes.
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataFailure(where, f"the image is not base64: {error}, in {short(text)}") from error


def messages(
    listed: Sequence[Any], images: Sequence[ImageSource], where: str, root: Path
) -> tuple[Message, ...]:
    """The messages with the row's images at their places, and all keys that a chat template reads.

    Raises DataFailure when places and images differ in number, for an empty question, and for a
    conversation that ends with the assistant.
    """
    for message in listed:
        if not isinstance(message, Mapping):
            raise DataFailure(
                where, f"cannot read the row: a message must be an object, found {short(message)}"
            )
    contents = _contents_with_places(listed, images, where, root)
    remaining = iter(images)
    result = []
    for message, pieces in zip(listed, contents, strict=True):
        parts = tuple(
            next(remaining) if piece is None else piece for piece in pieces if piece != ""
        )
        fields = _fields(message, where)
        if not parts and message["role"] == "user":
            raise DataFailure(
                where,
                "the field 'content' is missing or empty: a user's message has neither text nor"
                " image",
            )
        result.append(Message(message["role"], parts, fields))
    if result[-1].role == "assistant":
        raise DataFailure(
            where,
            "the prompt ends with the assistant's turn, which the policy would be shown: remove the"
            " last turn, or use it as the answer",
        )
    return tuple(result)


def _contents_with_places(
    listed: Sequence[Mapping[str, Any]], images: Sequence[ImageSource], where: str, root: Path
) -> list[Pieces]:
    """The messages' contents, with as many places as there are images.

    In a typed part of text the placeholder is a place only where an image would otherwise have
    none; else it is text.
    """
    numbers: list[int] = []
    # Placeholders are places at first; a text that only
    # mentions one is understood at the second try.
    for literal in (False, True):
        contents = [_content(message, where, root, literal) for message in listed]
        pieces = list(chain.from_iterable(contents))
        places = pieces.count(None)
        numbers.append(places)
        # Without stated places the images come first, which is TRL's order.
        if images and all(isinstance(piece, str) for piece in pieces):
            roles = [message["role"] for message in listed]
            question = contents[roles.index("user")] if "user" in roles else contents[-1]
            question[:0] = [None] * len(images)
            return contents
        if places == len(images):
            return contents
    hint = ""
    if numbers[0] > len(images):
        hint = (
            f'. Put a {PLACEHOLDER} that is text and not a place into a part: {{"type": "text",'
            ' "text": ...}'
        )
    raise DataFailure(
        where, f"{numbers[0]} {PLACEHOLDER} placeholders for {len(images)} images{hint}"
    )


def _content(message: Mapping[str, Any], where: str, root: Path, literal: bool) -> Pieces:
    """A message's content. An assistant that calls a tool may say nothing. Raises DataFailure."""
    if not isinstance(field(message, "role", where), str):
        raise DataFailure(where, f"a message's role must be a text, found {short(message['role'])}")
    content = message.get("content")
    if content is not None and content != []:
        return _pieces(content, where, root, literal)
    if not message.get("tool_calls"):
        raise DataFailure(where, "the field 'content' is missing or empty")
    return []


def _pieces(content: Any, where: str, root: Path, literal: bool) -> Pieces:
    pieces: Pieces = []
    if isinstance(content, str):
        for text in content.split(PLACEHOLDER):
            pieces += [None, text]
        return pieces[1:]
    for part in content if isinstance(content, list | tuple) else (content,):
        match part:
            case {"type": "text" | "input_text", "text": str(text)}:
                pieces += [text] if literal else _pieces(text, where, root, literal)
            case {"type": "image_url" | "input_image", "image_url": url}:
                if isinstance(url, Mapping) and "url" in url:
                    url = url["url"]
                pieces.append(image_entry(url, where, root))
            case {"type": "image"}:
                inline = any(part.get(key) is not None for key in ("image", "path", "bytes", "url"))
                pieces.append(image_entry(part, where, root) if inline else None)
            case _:
                parts = 'a text, or a list of {"type": "text", "text": ...} and {"type": "image"}'
                raise DataFailure(
                    where, f"a message's content must be {parts}, found {short(part)}"
                )
    return pieces


def _fields(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The message's keys, besides role and content, that have a value.

    Such are ``tool_calls``, ``tool_call_id``, ``name`` and ``reasoning_content``.
    """
    fields = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content") and value is not None
    }
    calls = parsed(fields.pop("tool_calls", None))
    if not calls:
        return fields
    are_objects = isinstance(calls, list | tuple) and all(
        isinstance(call, Mapping) for call in calls
    )
    if not are_objects:
        raise DataFailure(
            where, f"tool_calls of a message must be a list of objects, found {short(calls)}"
        )
    fields["tool_calls"] = list(calls)
    if message.get("content") is None:
        # Chat templates recognise a call without text by its null content.
        fields["content"] = None
    return fields


def offered(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row's column, or of its JSON text, as chat templates take them.

    Empty for a value that is not a list of schemas.
    """
    schemas = parsed(value)
    if isinstance(schemas, list | tuple) and all(map(_is_schema, schemas)):
        return tuple(schemas)
    return ()


def _is_schema(value: Any) -> bool:
    """Whether a value is a tool's schema, by itself or under the key ``function``."""
    return isinstance(value, Mapping) and isinstance(value.get("function", value).get("name"), str)


def without_nulls(value: Any) -> Any:
    """Nested data without null keys.

    Parquet gives an object every key that another object of the column has.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(part) for part in value]
    return value
