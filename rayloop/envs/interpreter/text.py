"""PyVision's texts: instructions, code, answers and results.

They are kept letter by letter, since models were trained on them.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rayloop.chat.calls import Enclosed, tagged

STOP = "</code>"
"""The end of a sampled turn (``rollout.sampling.stop``), or the policy invents the result."""
_CELL = Enclosed(r"<code>\s*```(?:python|py)?[ \t]*\n", r"```\s*(?:</code>|$)")
_FENCE = Enclosed(r"```(?:python|py)[ \t]*\n", "```")
_ANSWER = tagged("answer")

INSTRUCTIONS = (
    (Path(__file__).parent / "prompts" / "instructions.txt").read_text(encoding="utf-8").rstrip()
)


def code(turn: str) -> str | None:
    """Return the last fenced block within ``<code>``, else the last fence of Python, else None."""
    blocks = _CELL.findall(turn) or _FENCE.findall(turn)
    return blocks[-1] if blocks else None


def forbidden(code: str, expressions: Sequence[str]) -> bool:
    """Whether one of the regular expressions is found in the code."""
    return any(re.search(expression, code) for expression in expressions)


def answer(turn: str) -> str | None:
    """Return what the last ``<answer>`` holds, as written; None when it is blank or missing."""
    answers = _ANSWER.findall(turn)
    return answers[-1] if answers and answers[-1].strip() else None


def opened(text: str) -> str:
    """Return the result of code, up to where its pictures stand."""
    return f"<tool_response>\n<interpreter>\nText Result:\n{text.rstrip() or 'None'}\n"


CLOSED = "</interpreter>\n</tool_response>"


def clue(index: int) -> tuple[str, str]:
    """Return what stands before and after a picture that the policy is shown."""
    return f"<image_clue_{index}>", f"</image_clue_{index}>"


Wording = Literal[
    "rayloop",
    "pyvision_gym_w_image_hint",
    "pyvision_gym_wo_image_hint",
    "pyvision_gym_wo_video_hint",
]
PRELUDE = (
    "import base64, io, matplotlib\nimport matplotlib.pyplot as plt\nimport numpy as np\nfrom PIL"
    " import Image\n"
)
"""What PyVision's interpreters have imported before a policy's code begins."""
_PUBLISHED_CELL = Enclosed(r"<code>\s*```python", r"```\s*</code>")
_PUBLISHED_FENCE = Enclosed("```python", "```")


def published_code(turn: str) -> str | None:
    """Return the code as PyVision-RL (62ca599) reads it, without the blanks around it.

    The time is linear in the turn's length.
    """
    blocks = _PUBLISHED_CELL.findall(turn) or _PUBLISHED_FENCE.findall(turn)
    return (blocks[-1].strip() or None) if blocks else None


def published_answer(turn: str) -> str | None:
    """Return the answer as PyVision-RL reads it: what the last ``<answer>`` holds, blanks too.

    None when that is nothing at all.
    """
    answers = _ANSWER.findall(turn)
    return answers[-1] or None if answers else None


def published_result(wording: Wording, output: str, pictures: bool) -> tuple[str, str]:
    """Return what PyVision-RL's environment ``wording`` writes around the pictures of a result."""
    head = f"<tool_response>\n<interpreter>\nText Result:\n{output.strip()}"
    if pictures:
        gap = "" if wording == "pyvision_gym_w_image_hint" else "\n"
        head = f"<tool_response>\n<interpreter>{gap}Text Result:\n{output.strip()}\nImage Result:\n"
    elif wording == "pyvision_gym_wo_video_hint":
        head += "\n"
    return head, "</interpreter>\n\n</tool_response>"
