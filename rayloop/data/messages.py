"""The messages of a row: their texts, images, calls of tools, in the forms of OpenAI, TRL, verl and
``datasets``.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
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
_LONGEST_PATH = 4096
"""Characters; Linux has no longer ones."""

Pieces = list[str | ImageSource | None]
"""A message's content in reading order; None is a place for the next of the row's images."""


def blank(value: Any) -> bool:
    """Whether a value is there only in form: null, NaN or a text of white space."""
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
    """An image column's entry: a path (relative to ``root`` unless absolute), a data URL, base64 or
    bytes, also in a mapping as ``image``, ``path`` or ``bytes``. Raises DataFailure for anything
    else, URLs included: nothing is downloaded.
    """
    value: Any = entry
    if isinstance(entry, Mapping):
        if isinstance(entry.get("image"), Mapping):  # as datasets keeps an Image within messages
            return image_entry(entry["image"], where, root)
        value = next(
            (entry[key] for key in ("bytes", "image", "path") if entry.get(key) is not None), None
        )
        # JSON has no bytes, so that datasets' ``bytes`` become base64 there.
        if isinstance(value, str) and entry.get("bytes") is not None:
            return ImageSource(data=_decoded(value, where))
    if isinstance(value, bytes):
        return ImageSource(data=value)
    if not isinstance(value, str) or not value:
        expected = "a path, a data URL, {image: path}, {path: ...} or {bytes: ...}"
        raise DataFailure(where, f"an image must be {expected}, found {short(entry)}")
    if value.startswith("data:") or (
        value.startswith(ENCODED) and re.fullmatch(r"[\w+/=\s-]{100,}", value)
    ):
        return ImageSource(data=_decoded(value, where))
    if re.match("https?://", value):
        raise DataFailure(
            where,
            f"images are not downloaded: {short(value)}. Save it beside the data and give its path",
        )
    if len(value) > _LONGEST_PATH:
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
    """The messages, with the row's images at their places and all keys that a chat template may
    read. Raises DataFailure when places and images differ in number, for an empty question, and for
    a conversation that ends with the assistant.
    """
    for message in listed:
        if not isinstance(message, Mapping):
            raise DataFailure(
                where, f"cannot read the row: a message must be an object, found {short(message)}"
            )
    contents = _placed(listed, images, where, root)
    remaining = iter(images)
    made = []
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
        made.append(Message(message["role"], parts, fields))
    if made[-1].role == "assistant":
        why = "the prompt ends with the assistant's turn, which the policy would be shown"
        raise DataFailure(where, f"{why}: remove the last turn, or use it as the answer")
    return tuple(made)


def _placed(
    listed: Sequence[Mapping[str, Any]], images: Sequence[ImageSource], where: str, root: Path
) -> list[Pieces]:
    """The messages' contents, with as many places as there are images.

    In typed parts of text the placeholder is one where an image would have no place without it,
    else what it says.
    """
    numbers: list[int] = []
    # Placeholders are places at first; a text that only
    # mentions one is understood at the second try.
    for literal in (False, True):
        contents = [_content(message, where, root, literal) for message in listed]
        pieces = [piece for content in contents for piece in content]
        places = sum(piece is None for piece in pieces)
        numbers.append(places)
        if images and all(
            isinstance(piece, str) for piece in pieces
        ):  # nothing says where: they come first, as in TRL
            roles = [message["role"] for message in listed]
            asking = contents[roles.index("user")] if "user" in roles else contents[-1]
            asking[:0] = [None] * len(images)
            return contents
        if places == len(images):
            return contents
    hint = ""
    if numbers[0] > len(images):
        hint = (
            f'. A {PLACEHOLDER} that is text and not a place stands in a part: {{"type": "text",'
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
                pieces.append(
                    image_entry(
                        url["url"] if isinstance(url, Mapping) and "url" in url else url,
                        where,
                        root,
                    )
                )
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
    """The message's other keys that have a value: ``tool_calls``, ``tool_call_id``, ``name``,
    ``reasoning_content``.
    """
    fields = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content") and value is not None
    }
    calls = parsed(fields.pop("tool_calls", None))
    if calls:
        if not (
            isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)
        ):
            raise DataFailure(
                where, f"tool_calls of a message must be a list of objects, found {short(calls)}"
            )
        fields["tool_calls"] = list(calls)
        if message.get("content") is None:
            # Chat templates recognise a call without text by its null content.
            fields["content"] = None
    return fields


def offered(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row's column, or of its JSON text, as chat templates take them; empty for what
    is no list of schemas.
    """
    found = parsed(value)
    schemas = isinstance(found, list | tuple) and all(
        isinstance(one, Mapping) and isinstance(one.get("function", one).get("name"), str)
        for one in found
    )
    return tuple(found) if schemas else ()


def without_nulls(value: Any) -> Any:
    """Nested data without the null keys that parquet gives each object which lacks a key of another
    one.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list | tuple) else value
