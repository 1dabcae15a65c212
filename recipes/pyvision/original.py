"""The parsers of PyVision-RL (agents-x-project/PyVision-RL at 62ca599) and DeepEyes
(Visual-Agent/DeepEyes at 6c5e796), mistakes included, for the ``original`` variants. Each search is
linear in the text.
"""

import re
from dataclasses import dataclass
from typing import Any

from rayloop.chat.calls import Enclosed
from rayloop.envs.interpreter import text as interpreter

LONGEST = 1000
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
"""Data sources with examples for the judge; for any other the multi-task verifier raises
UnboundLocalError.
"""
BENCHMARKS = {
    "direct_attributes": "vstar",
    "relative_position": "vstar",
    "single": "hrbench-4k",
    "cross": "hrbench-4k",
}
"""Categories in V*'s and HR-Bench's own files -> the data source that its rows of them have.

4K and 8K are judged alike.
"""
BROKEN = frozenset({"geoguessr", "thinklite_eureka", "xince"})
"""Data sources whose functions refer to names that are not there."""
FORBIDDEN = (r"input\(", r"os\.system\(", r"subprocess\(")
"""Expressions of code that its interpreter refuses to run
(``PythonInterpreter.Settings.forbidden``).
"""
_BEGIN, _END = "<answer>\n\\boxed{", "}\n</answer>"
_NUMBER = re.compile(r"[-+]?\d*\.?\d+")
_GRADE = re.compile(r"correct: (yes|no)", re.IGNORECASE)
_BOXED = Enclosed(r"\\boxed\{", "}")


def answer(response: str) -> str | None:
    """The text in the first ``<answer>``, line break, ``\\boxed{...}``, line break, ``</answer>``, also in tool output."""
    start = response.find(_BEGIN)
    end = response.find(_END, start + len(_BEGIN)) if start >= 0 else -1
    return response[start + len(_BEGIN) : end].strip() if end >= 0 else None


def verified(response: str, *, gate: bool) -> str | None:
    """The answer that is judged, None when it is wrong unseen.

    ``gate``: tags must be in pairs, too (the multi-task verifier).
    """
    final = response.rpartition("</interpreter>")[2]
    if gate and (unpaired_images(response) or final.count("<answer>") != final.count("</answer>")):
        return None
    found = answer(response)
    nested = found is not None and any(
        mark in found for mark in ("<interpreter>", "<answer>", "\\boxed")
    )
    return None if nested else found


def unpaired_images(response: str) -> bool:
    """Whether tags of images are not in pairs."""
    begun, ended = (
        response.count("<|vision_start|><|image_pad|>"),
        response.count("<|image_pad|><|vision_end|>"),
    )
    return begun != ended


def verdict(reply: str) -> bool:
    """The verdict of a judge that writes a digit: any 1 after the last ``Judgement:`` is right,
    else the whole reply must be 1.
    """
    _, mark, said = reply.rpartition("Judgement:")
    return "1" in said if mark else reply.strip() == "1"


def grade(reply: str) -> bool:
    """The verdict of the general verifier's grader: ``correct: yes`` is right."""
    found = _GRADE.search(reply)
    return found is not None and found[1].lower() == "yes"


def first_number(value: Any) -> float | None:
    """The first number in a text; a comma ends it."""
    if isinstance(value, int | float):
        return float(value)
    found = _NUMBER.search(value) if isinstance(value, str) else None
    return float(found[0]) if found else None


def step_reward(turn: str, ran: bool, per_call: float) -> float:
    """The environment's pay for a turn: ``per_call`` for code that ran, also when it failed or took
    too long, else 0.
    """
    return (
        per_call
        if ran and interpreter.answer(turn) is None and interpreter.code(turn) is not None
        else 0.0
    )


@dataclass(frozen=True, slots=True)
class DeepEyes:
    """``answer``: the judged one, ``formed``: tags are in pairs (and one box, of mathematics),
    ``looked``: an image was shown, ``calls``: turns whose call was carried out.
    """

    answer: str | None
    formed: bool
    looked: bool = False
    calls: float = 0.0


def deepeyes(response: str) -> DeepEyes:
    """The last answer; the whole text where there is no tag.

    From ``LONGEST`` characters on it is wrong and ill-formed.
    """
    said = response.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    behind = response.rpartition("</think>")[2]
    paired = response.count("<think>") == response.count("</think>") and not unpaired_images(
        response
    )
    formed = (
        paired and behind.count("<answer>") == behind.count("</answer>") and len(said) < LONGEST
    )
    return DeepEyes(
        said if len(said) < LONGEST else None, formed, "<|vision_start|><|image_pad|>" in response
    )


def deepeyes_math(response: str) -> DeepEyes:
    """The last box behind the thought; none, or several, is ill-formed."""
    found = list(filter(None, _BOXED.findall(response.rpartition("</think>")[2])))
    formed = response.count("<think>") == response.count("</think>") and len(found) == 1
    return DeepEyes(found[-1] if found else None, formed)
