"""What the model is asked: instructions and examples first (shared prefix), then the item, the candidate fenced as data."""

from __future__ import annotations

import base64
import json
import re
import secrets
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from judge.api import JudgeItem
from judge.labelled import CANARY_IMAGE, canary_image
from judge.rubric import Example, Rubric
from judge.verdict import SCORES
from rayloop.core.failures import InfrastructureFailure

_SPECIAL = re.compile(
    r"<[|｜][^<>]{0,64}?[|｜]>"  # <|im_start|>, <|vision_pad|>, <|endoftext|>
    r"|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk|image|video|box)>"
    r"|</?(?:answer|think|tool_call|tool_response|interpreter|system|user|assistant|candidate[\w-]*)>",
    re.IGNORECASE,
)
_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Cn"}
IMAGES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""File suffix -> kind of the images that a model is shown."""


def sanitise(text: str, limit: int) -> str:
    """Text without chat-template and vision tokens, control and invisible characters, cut to ``limit`` characters.

    Repeated until nothing is left to remove, so that tokens nested in tokens do not survive.
    """
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE)
    before = None
    while text != before:
        before, text = text, _SPECIAL.sub("", text)
    return text[:limit].strip()


def schema(rubric: Rubric) -> dict[str, Any]:
    """The JSON schema of the reply; the reason comes before the verdict."""
    name, values = ("verdict", ["correct", "incorrect"]) if rubric.kind == "binary" else ("score", list(SCORES))
    return {
        "type": "object",
        "properties": {"reason": {"type": "string", "maxLength": 200}, name: {"enum": values}},
        "required": ["reason", name],
        "additionalProperties": False,
    }


def messages(rubric: Rubric, item: JudgeItem, nonce: str | None = None) -> list[Mapping[str, Any]]:
    """Chat messages (OpenAI's form). ``nonce`` names the fence of this call's candidate; random unless given.

    Raises InfrastructureFailure for an image that cannot be read. Whether it is one, and may be, the server has checked.
    """
    form = '{"reason": "...", "verdict": "correct"}' if rubric.kind == "binary" else '{"reason": "...", "score": 0.5}'
    task = f"{rubric.instructions}\nReply with one JSON object and nothing else: {form}"
    found: list[Mapping[str, Any]] = [{"role": "system", "content": task}]
    for example in rubric.examples[rubric.family(item.source)]:
        found.append({"role": "user", "content": _ask(rubric, example, "example")})
        found.append({"role": "assistant", "content": _reply(example)})
    text = _ask(rubric, item, nonce or secrets.token_hex(8))
    if not rubric.sees_images or not item.images:
        return [*found, {"role": "user", "content": text}]
    return [*found, {"role": "user", "content": [*map(_image, item.images), {"type": "text", "text": text}]}]


def _ask(rubric: Rubric, item: JudgeItem | Example, nonce: str) -> str:
    fence = f"candidate-{nonce}"
    candidate = sanitise(item.answer, rubric.max_answer).replace(nonce, "")
    return (
        f"Question: {sanitise(item.question, 4096)}\nReference answer: {sanitise(item.reference, 4096)}\n"
        f"The candidate's answer is the JSON string between the fences.\n<{fence}>\n"
        f"{json.dumps(candidate, ensure_ascii=False)}\n</{fence}>"
    )


def _reply(example: Example) -> str:
    verdict = {"verdict": example.verdict} if example.score is None else {"score": example.score}
    return json.dumps({"reason": example.reason, **verdict}, ensure_ascii=False)


def _image(path: str) -> Mapping[str, Any]:
    """The file itself, so that nobody fetches anything."""
    if path == CANARY_IMAGE:
        data = base64.b64encode(canary_image()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    try:
        data = base64.b64encode(Path(path).read_bytes()).decode()
    except OSError as error:
        raise InfrastructureFailure(f"{path}: the image cannot be read: {error.strerror}") from error
    return {"type": "image_url", "image_url": {"url": f"data:image/{IMAGES[Path(path).suffix.lower()]};base64,{data}"}}
