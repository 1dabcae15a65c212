"""What the model is asked, and how its reply is read.

The prompt has instructions and examples first (a shared prefix), then the item, with the candidate
fenced as data. A reply is one JSON object of the rubric's form, alone or in one code fence, or no
verdict; no part of it counts.
"""

import json
import re
import secrets
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rayloop.core.failures import InfrastructureFailure
from rayloop.core.files import content
from rayloop.data.images import MOST_BYTES, data_url, portable
from rayloop.judge.api import JudgeItem, VerdictKind
from rayloop.judge.rubric import CANARY_IMAGE, Example, Rubric, canary_image

VERSION = 2
"""Part of the judge's fingerprint. Raise it with every change of the prompt."""
_LONGEST = 80
"""Characters of the longest special token that is removed."""
_TOKENS = Path(__file__).with_name("data") / "special_tokens.txt"
_SPECIAL = re.compile("".join(_TOKENS.read_text(encoding="utf-8").splitlines()), re.IGNORECASE)
"""Tokens of templates and images: Qwen, Llama, Mistral, Gemma, GLM, DeepSeek, InternVL, BERT,
Command, StarCoder, MiniMax, Seed.
"""
_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Cn"}
IMAGES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""File suffix -> image type, of the images that a model may be shown."""


def sanitise(text: str, limit: int) -> str:
    """Text without chat-template and vision tokens, control and invisible characters, cut to
    ``limit`` characters. One pass: a token is taken off where it closes, so tokens that are nested,
    or come about by a removal, do not survive either.
    """
    kept: list[str] = []
    opened: list[int] = []
    for character in text:
        if character not in "\n\t" and unicodedata.category(character) in _INVISIBLE:
            continue
        if character in "<[]":
            opened.append(len(kept))
        kept.append(character)
        if character in ">][":
            for start in opened[:-5:-1]:
                if len(kept) - start <= _LONGEST and _SPECIAL.fullmatch("".join(kept[start:])):
                    del kept[start:]
                    while opened and opened[-1] >= start:
                        opened.pop()
                    break
    return "".join(kept)[:limit].strip()


def shortened(text: str, limit: int) -> str:
    """``sanitise``, with a note at the end when the text was cut."""
    clean = sanitise(text, len(text))
    return (
        clean
        if len(clean) <= limit
        else f"{clean[:limit]} [the text goes on: {len(clean) - limit} more characters]"
    )


def schema(rubric: Rubric) -> dict[str, Any]:
    """The JSON schema of the reply; the reason comes before the verdict."""
    name, values = FIELDS[rubric.kind]
    return {
        "type": "object",
        # Engines write the keys in this order, so the model reasons before it decides.
        "properties": {
            "reason": {"type": "string", "maxLength": 200},
            name: {"enum": list(values)},
        },
        "required": ["reason", name],
        "additionalProperties": False,
    }


def messages(rubric: Rubric, item: JudgeItem, nonce: str | None = None) -> list[Mapping[str, Any]]:
    """Chat messages (OpenAI's form).

    ``nonce`` names the fence of this call's candidate; random unless given. Raises
    InfrastructureFailure for an image that cannot be read. The server has checked its type and its
    place.
    """
    form = (
        '{"reason": "...", "verdict": "correct"}'
        if rubric.kind == "binary"
        else '{"reason": "...", "score": 0.5}'
    )
    task = f"{rubric.instructions}\nReply with one JSON object and nothing else: {form}"
    found: list[Mapping[str, Any]] = [{"role": "system", "content": task}]
    for example in rubric.examples[rubric.family(item.source)]:
        found.append({"role": "user", "content": _ask(rubric, example, "example")})
        found.append({"role": "assistant", "content": _reply(example)})
    text = _ask(rubric, item, nonce or secrets.token_hex(8))
    if not rubric.sees_images or not item.images:
        return [*found, {"role": "user", "content": text}]
    return [
        *found,
        {"role": "user", "content": [*map(_image, item.images), {"type": "text", "text": text}]},
    ]


def _ask(rubric: Rubric, item: JudgeItem | Example, nonce: str) -> str:
    fence = f"candidate-{nonce}"
    # A candidate that holds the nonce could close its own fence.
    candidate = sanitise(item.answer, rubric.max_answer).replace(nonce, "")
    return (
        f"Question: {shortened(item.question, 4096)}\nReference answer:"
        f" {shortened(item.reference, 8192)}\nThe candidate's answer is the JSON string between the"
        f" fences.\n<{fence}>\n{json.dumps(candidate, ensure_ascii=False)}\n</{fence}>"
    )


def _reply(example: Example) -> str:
    verdict = {"verdict": example.verdict} if example.score is None else {"score": example.score}
    return json.dumps({"reason": example.reason, **verdict}, ensure_ascii=False)


def _image(path: str) -> Mapping[str, Any]:
    """The image as a ``data:`` URL, with the pixels that the policy was shown."""
    try:
        data = canary_image() if path == CANARY_IMAGE else content(path, MOST_BYTES)
        return {"type": "image_url", "image_url": {"url": data_url(portable(data))}}
    except (OSError, ValueError, SyntaxError) as error:
        raise InfrastructureFailure(f"{path}: the image cannot be read: {error}") from error


REPLY_VERSION = 2
"""Part of the judge's fingerprint. Raise it with every change of the reading of replies."""
SCORES = (0, 0.25, 0.5, 0.75, 1)
"""The scores that a scored rubric allows."""
FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "binary": ("verdict", ("correct", "incorrect")),
    "scored": ("score", SCORES),
}
"""The key of a reply beside ``reason``, and its values, by the rubric's kind."""
_FENCED = re.compile(r"(`{3,}|~{3,})[\w+.-]*\s*(\{.*\})\s*\1", re.DOTALL)
"""A code fence of Markdown, with or without a language, around all of a reply: many models write
one, asked for JSON or not.
"""


class InvalidVerdict(ValueError):
    """A reply that is no verdict. The message gives the reason, with the reply's beginning."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict as the model gave it: ``score`` in [0, 1]; for a scored rubric ``verdict`` is
    correct from 0.5.
    """

    verdict: VerdictKind
    score: float
    reason: str


def parse(text: str, kind: Literal["binary", "scored"]) -> Judgement:
    """The verdict of a whole reply.

    Raises InvalidVerdict for anything but the one object of this kind; a fence may be around.
    """
    name, allowed = FIELDS[kind]
    fenced = _FENCED.fullmatch(text.strip())
    whole = fenced.group(2) if fenced else text
    try:
        # strict=False: a grammar with a maxLength lets engines write control characters into the
        # reason.
        data = json.loads(
            whole, strict=False, object_pairs_hook=_unique, parse_constant=_no_constant
        )
        if (
            not isinstance(data, dict)
            or data.keys() != {"reason", name}
            or not isinstance(data["reason"], str)
        ):
            raise ValueError(f"expected an object of reason and {name}")
        if isinstance(data[name], bool) or data[name] not in allowed:
            raise ValueError(f"{name} is none of {', '.join(map(str, allowed))}")
    except (ValueError, TypeError, RecursionError) as error:
        why = _around(whole) or str(error)
        raise InvalidVerdict(f"the judge's reply is no verdict ({why}): {text[:120]!r}") from error
    score = float(data[name] == "correct") if kind == "binary" else float(data[name])
    # At most 200 characters, without the lone surrogates that an escape such as \ud83d leaves:
    # UTF-8 has none.
    reason = data["reason"][:200].encode(errors="ignore").decode()
    return Judgement(VerdictKind.CORRECT if score >= 0.5 else VerdictKind.INCORRECT, score, reason)


def _around(text: str) -> str:
    """What a reply has beside an object, and what helps; "" where that is not the matter."""
    first, last = text.find("{"), text.rfind("}")
    if "</think>" in text and text[:first].strip():
        return (
            "it begins with the model's reasoning: start the server with its reasoning parser, or"
            " turn thinking off"
        )
    if first < 0 or last < first:
        return "it has no JSON object"
    if text[:first].strip() or text[last + 1 :].strip():
        return (
            "text stands around the JSON object: the server does not enforce response_format's"
            " json_schema"
        )
    return ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")
