"""The prompt for the model, and the reading of its reply.

The prompt has instructions and examples first (a shared prefix), then the item, with the candidate
fenced as data. A reply must be one JSON object of the rubric's form, alone or in one code fence;
any other reply has no verdict, and no part of it counts.
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

PROMPT_VERSION = 3
"""Part of the judge's fingerprint. Raise it with every change of the prompt."""
_MAX_TOKEN_CHARACTERS = 80
"""Characters of the longest special token that is removed."""
_MAX_OPEN_BRACKETS = 5
"""The latest brackets of a text, any of which may begin the special token that ends there."""
_MAX_REASON = 200
_TOKENS = Path(__file__).with_name("data") / "special_tokens.txt"
_SPECIAL = re.compile("".join(_TOKENS.read_text(encoding="utf-8").splitlines()), re.IGNORECASE)
"""Special tokens of chat templates and images.

Qwen, Llama, Mistral, Gemma, GLM, DeepSeek, InternVL, BERT, Command, StarCoder, MiniMax, Seed,
LongCat, Hunyuan.
"""
_SWITCHES = ("/no_think", "/nothink")
"""Words by which a text turns off the thinking of Qwen3 and GLM, wherever they stand."""
_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Cn"}
IMAGES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""Image types that a model may be shown, by file suffix."""


def sanitise(text: str, limit: int) -> str:
    """Text without special tokens, control and invisible characters, cut to ``limit`` characters.

    Special tokens are the tokens of chat templates and vision, and the switches of thinking. One
    pass: a token is removed where it ends, so nested tokens, and tokens that result from a removal,
    are removed too.
    """
    output: list[str] = []
    open_brackets: list[int] = []
    for character in text:
        if character not in "\n\t" and unicodedata.category(character) in _INVISIBLE:
            continue
        if character in "<[]":
            open_brackets.append(len(output))
        output.append(character)
        if character in ">][":
            _remove_special_token(output, open_brackets)
        elif character in "kK":
            _remove_switch(output)
    return "".join(output)[:limit].strip()


def _remove_special_token(output: list[str], open_brackets: list[int]) -> None:
    """Remove the special token at the end of the output, if there is one."""
    nearest_first = open_brackets[: -_MAX_OPEN_BRACKETS - 1 : -1]
    for start in nearest_first:
        if len(output) - start > _MAX_TOKEN_CHARACTERS:
            continue
        if _SPECIAL.fullmatch("".join(output[start:])):
            del output[start:]
            while open_brackets and open_brackets[-1] >= start:
                open_brackets.pop()
            return


def _remove_switch(output: list[str]) -> None:
    """Remove the switch of thinking at the end of the output, if there is one."""
    longest = max(map(len, _SWITCHES))
    end = "".join(output[-longest:]).lower()
    for switch in _SWITCHES:
        if end.endswith(switch):
            del output[-len(switch) :]
            return


def shortened(text: str, limit: int) -> str:
    """``sanitise``, with a note at the end when the text was cut."""
    clean = sanitise(text, len(text))
    rest = len(clean) - limit
    if rest <= 0:
        return clean
    return f"{clean[:limit]} [the text goes on: {rest} more characters]"


def schema(rubric: Rubric) -> dict[str, Any]:
    """The JSON schema of the reply; the reason comes before the verdict."""
    name, values = FIELDS[rubric.kind]
    return {
        "type": "object",
        # Engines write the keys in this order, so the model reasons before it decides.
        "properties": {
            "reason": {"type": "string", "maxLength": _MAX_REASON},
            name: {"enum": list(values)},
        },
        "required": ["reason", name],
        "additionalProperties": False,
    }


def messages(rubric: Rubric, item: JudgeItem, nonce: str | None = None) -> list[Mapping[str, Any]]:
    """Chat messages (OpenAI's form).

    ``nonce`` names the fence of this call's candidate; random by default. Raises
    InfrastructureFailure for an image that cannot be read. The server has checked its type and its
    path.
    """
    task = f"{rubric.instructions}\nReply with one JSON object and nothing else: "
    task += _REPLY_FORMS[rubric.kind]
    chat: list[Mapping[str, Any]] = [{"role": "system", "content": task}]
    for example in rubric.examples[rubric.family(item.source)]:
        chat.append({"role": "user", "content": _item_text(rubric, example, "example")})
        chat.append({"role": "assistant", "content": _reply(example)})

    text = _item_text(rubric, item, nonce or secrets.token_hex(8))
    if rubric.sees_images and item.images:
        parts = [*map(_image, item.images), {"type": "text", "text": text}]
        chat.append({"role": "user", "content": parts})
    else:
        chat.append({"role": "user", "content": text})
    return chat


def _item_text(rubric: Rubric, item: JudgeItem | Example, nonce: str) -> str:
    fence = f"candidate-{nonce}"
    # A candidate that holds the nonce could close its own fence.
    candidate = sanitise(item.answer, rubric.max_answer).replace(nonce, "")
    return (
        f"Question: {shortened(item.question, 4096)}\nReference answer:"
        f" {shortened(item.reference, 8192)}\nThe candidate's answer is the JSON string between the"
        f" fences.\n<{fence}>\n{json.dumps(candidate, ensure_ascii=False)}\n</{fence}>"
    )


def _reply(example: Example) -> str:
    reply: dict[str, Any] = {"reason": example.reason}
    if example.score is None:
        reply["verdict"] = example.verdict
    else:
        reply["score"] = example.score
    return json.dumps(reply, ensure_ascii=False)


def _image(path: str) -> Mapping[str, Any]:
    """The image as a ``data:`` URL, with the pixels that the policy was shown."""
    try:
        data = canary_image() if path == CANARY_IMAGE else content(path, MOST_BYTES)
        return {"type": "image_url", "image_url": {"url": data_url(portable(data))}}
    except (OSError, ValueError, SyntaxError) as error:
        raise InfrastructureFailure(f"{path}: the image cannot be read: {error}") from error


REPLY_VERSION = 2
"""Part of the judge's fingerprint. Raise it with every change of the reading of replies."""
RUBRIC_SCORES = (0, 0.25, 0.5, 0.75, 1)
"""The scores that a scored rubric allows."""
FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "binary": ("verdict", ("correct", "incorrect")),
    "scored": ("score", RUBRIC_SCORES),
}
"""The second key of a reply, after ``reason``, and its values, by the rubric's kind."""
_REPLY_FORMS = {
    "binary": '{"reason": "...", "verdict": "correct"}',
    "scored": '{"reason": "...", "score": 0.5}',
}
_FENCED = re.compile(r"(`{3,}|~{3,})[\w+.-]*\s*(\{.*\})\s*\1", re.DOTALL)
"""A code fence of Markdown, with or without a language, around all of a reply.

Many models write one, whether they are asked for JSON or not.
"""


class InvalidVerdict(ValueError):
    """A reply without a verdict. The message gives the reason, with the reply's beginning."""


@dataclass(frozen=True)
class Judgement:
    """A verdict as the model gave it.

    ``score`` is in [0, 1]; for a scored rubric ``verdict`` is correct from 0.5.
    """

    verdict: VerdictKind
    score: float
    reason: str


def parse(text: str, kind: Literal["binary", "scored"]) -> Judgement:
    """The verdict of a complete reply.

    Raises InvalidVerdict for anything but the one object of this kind, which may be in a code
    fence.
    """
    fence = _FENCED.fullmatch(text.strip())
    json_text = fence.group(2) if fence else text
    try:
        value, reason = _fields(json_text, kind)
    except (ValueError, TypeError, RecursionError) as error:
        problem = _surrounding_text(json_text) or str(error)
        raise InvalidVerdict(
            f"the judge's reply has no verdict ({problem}): {text[:120]!r}"
        ) from error

    score = float(value == "correct") if kind == "binary" else float(value)
    verdict = VerdictKind.CORRECT if score >= 0.5 else VerdictKind.INCORRECT
    # UTF-8 has no lone surrogates, which an escape such as \ud83d leaves.
    return Judgement(verdict, score, reason[:_MAX_REASON].encode(errors="ignore").decode())


def _fields(text: str, kind: Literal["binary", "scored"]) -> tuple[Any, str]:
    """The value and the reason of a reply. Raises ValueError, TypeError or RecursionError."""
    name, values = FIELDS[kind]
    # strict=False: a grammar with a maxLength lets engines write control characters into the
    # reason.
    data = json.loads(text, strict=False, object_pairs_hook=_unique, parse_constant=_no_constant)
    has_fields = isinstance(data, dict) and data.keys() == {"reason", name}
    if not has_fields or not isinstance(data["reason"], str):
        raise ValueError(f"expected an object of reason and {name}")
    if isinstance(data[name], bool) or data[name] not in values:
        raise ValueError(f"{name} is not one of {', '.join(map(str, values))}")
    return data[name], data["reason"]


def _surrounding_text(text: str) -> str:
    """Which text a reply has around its object, and the remedy; "" when that is not the problem."""
    first = text.find("{")
    last = text.rfind("}")
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
    raise ValueError(f"{name} is not a number")
