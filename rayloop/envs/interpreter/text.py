"""PyVision's texts, kept letter by letter, since models were trained on them: instructions, code, answers, results."""

import re
from collections.abc import Sequence

STOP = "</code>"
"""The end of a sampled turn (``rollout.sampling.stop``), or the policy invents the result."""
_CELL = re.compile(r"<code>\s*```(?:python|py)?[ \t]*\n(.*?)```\s*(?:</code>|$)", re.DOTALL)
_FENCE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

INSTRUCTIONS = """\
You are an agent that solves the question step by step, by writing Python that is run for you. Plan before each call of code and
reflect on its result after it. Names, imports and images are kept from one call to the next.
{inputs}
Write code as
<code>
```python
# your code
```
</code>
Show a picture with plt.show() and values with print(). When you are sure, answer with
<answer>
\\boxed{{your answer}}
</answer>"""


def code(turn: str) -> str | None:
    """The last fenced block within ``<code>``, else the last fence of Python; None without one."""
    found = _CELL.findall(turn) or _FENCE.findall(turn)
    return found[-1] if found else None


def forbidden(code: str, expressions: Sequence[str]) -> bool:
    """Whether one of the regular expressions is found in the code."""
    return any(re.search(expression, code) for expression in expressions)


def answer(turn: str) -> str | None:
    """What the last ``<answer>`` holds, as it is written; None when there is none or it is blank."""
    found = _ANSWER.findall(turn)
    return found[-1] if found and found[-1].strip() else None


def opened(text: str) -> str:
    """The result of code, up to where its pictures stand."""
    return f"<tool_response>\n<interpreter>\nText Result:\n{text.rstrip() or 'None'}\n"


CLOSED = "</interpreter>\n</tool_response>"


def clue(index: int) -> tuple[str, str]:
    """What stands before and after a picture that the policy is shown."""
    return f"<image_clue_{index}>", f"</image_clue_{index}>"
