"""The parsers of PyVision-RL and DeepEyes, mistakes included, for the ``original`` variants.

They come from agents-x-project/PyVision-RL at 62ca599 and Visual-Agent/DeepEyes at 6c5e796. Each
search is linear in the text.
"""

import re
from dataclasses import dataclass
from typing import Any

from rayloop.chat.calls import Enclosed
from rayloop.envs.interpreter import text as interpreter

LONG_ANSWER_CHARACTERS = 1000
"""Characters from which an answer is too long."""
EXAMPLES = frozenset(
    {
        "deepeyes",
        "minio3",
        "vstar",
        "hrbench-4k",
        "hrbench-8k",
        "ecd",
        "wemath-standard",
        "wemath-pro",
        "v-interaction",
        "mathvision",
        "wemath",
        "mathvista",
        "mathverse",
        "logicvista",
        "vsi",
        "longvila",
    }
)
"""Data sources with examples for the judge.

For any other the multi-task verifier raises UnboundLocalError.
"""
BENCHMARKS = {
    "direct_attributes": "vstar",
    "relative_position": "vstar",
    "single": "hrbench-4k",
    "cross": "hrbench-4k",
}
"""Categories in V*'s and HR-Bench's own files -> the data source that its rows of them have.

4K and 8K are judged in the same way.
"""
BROKEN = frozenset({"geoguessr", "thinklite_eureka", "xince"})
"""Data sources whose functions refer to names that do not exist."""
FORBIDDEN = (r"input\(", r"os\.system\(", r"subprocess\(")
"""Expressions of code that its interpreter refuses to run
(``PythonInterpreter.Settings.forbidden``).
"""
_BEGIN, _END = "<answer>\n\\boxed{", "}\n</answer>"
_NUMBER = re.compile(r"[-+]?\d*\.?\d+")
_GRADE = re.compile(r"correct: (yes|no)", re.IGNORECASE)
_BOXED = Enclosed(r"\\boxed\{", "}")


def answer(response: str) -> str | None:
    """The text in the first answer, also in tool output.

    An answer is ``<answer>``, line break, ``\\boxed{...}``, line break, ``</answer>``.
    """
    start = response.find(_BEGIN)
    end = response.find(_END, start + len(_BEGIN)) if start >= 0 else -1
    return response[start + len(_BEGIN) : end].strip() if end >= 0 else None


def verified(response: str, *, gate: bool) -> str | None:
    """The answer that is judged, None when it is wrong without a judge.

    ``gate``: tags must also be in pairs (the multi-task verifier).
    """
    final = response.rpartition("</interpreter>")[2]
    unpaired = unpaired_images(response) or final.count("<answer>") != final.count("</answer>")
    if gate and unpaired:
        return None
    text = answer(response)
    if text is None or any(mark in text for mark in ("<interpreter>", "<answer>", "\\boxed")):
        return None
    return text


def unpaired_images(response: str) -> bool:
    """Whether tags of images are not in pairs."""
    opened = response.count("<|vision_start|><|image_pad|>")
    closed = response.count("<|image_pad|><|vision_end|>")
    return opened != closed


def verdict(reply: str) -> bool:
    """The verdict of a judge that writes a digit.

    Any 1 after the last ``Judgement:`` is right, else the whole reply must be 1.
    """
    _, mark, judgement = reply.rpartition("Judgement:")
    return "1" in judgement if mark else reply.strip() == "1"


def grade(reply: str) -> bool:
    """The verdict of the general verifier's grader: ``correct: yes`` is right."""
    match = _GRADE.search(reply)
    return match is not None and match[1].lower() == "yes"


def first_number(value: Any) -> float | None:
    """The first number in a text; a comma ends it."""
    if isinstance(value, int | float):
        return float(value)
    match = _NUMBER.search(value) if isinstance(value, str) else None
    return float(match[0]) if match else None


def step_reward(turn: str, ran: bool, per_call: float) -> float:
    """The environment's pay for a turn: ``per_call`` for code that ran, else 0.

    Code that failed or took too long also ran.
    """
    if not ran or interpreter.answer(turn) is not None:
        return 0.0
    return 0.0 if interpreter.code(turn) is None else per_call


@dataclass(frozen=True)
class DeepEyes:
    """An answer as DeepEyes' reward reads it.

    ``answer``: the judged one, ``formed``: tags are in pairs (and mathematics has one box),
    ``looked``: an image was shown, ``calls``: turns whose call was carried out.
    """

    answer: str | None
    formed: bool
    looked: bool = False
    calls: float = 0.0


def deepeyes(response: str) -> DeepEyes:
    """The last answer; the whole text where it has no tag.

    An answer of ``LONG_ANSWER_CHARACTERS`` or more is wrong and ill-formed.
    """
    answer = response.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    after_thought = response.rpartition("</think>")[2]
    thoughts_paired = response.count("<think>") == response.count("</think>")
    answers_paired = after_thought.count("<answer>") == after_thought.count("</answer>")
    paired = thoughts_paired and answers_paired and not unpaired_images(response)
    looked = "<|vision_start|><|image_pad|>" in response
    if len(answer) >= LONG_ANSWER_CHARACTERS:
        return DeepEyes(None, False, looked)
    return DeepEyes(answer, paired, looked)


def deepeyes_math(response: str) -> DeepEyes:
    """The last box after the thought; none, or several, is ill-formed."""
    boxes = [text for text in _BOXED.findall(response.rpartition("</think>")[2]) if text]
    paired = response.count("<think>") == response.count("</think>")
    return DeepEyes(boxes[-1] if boxes else None, paired and len(boxes) == 1)
