"""The linear reader of what stands between two marks finds what the pattern of ``re`` finds."""

import re

from hypothesis import given
from hypothesis import strategies as st

from rayloop.chat.calls import Enclosed, bodies, tagged, without_calls

CELL = r"<code>\s*```(?:python|py)?[ \t]*\n", r"```\s*(?:</code>|$)"
FENCE = r"```(?:python|py)[ \t]*\n", "```"
PIECES = (
    "<code>",
    "</code>",
    "```",
    "`",
    "python",
    "py",
    "\n",
    " ",
    "x",
    "<tool_call>",
    "</tool_call>",
    "<a>",
    "</a>",
)


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_it_finds_what_the_pattern_finds(text: str) -> None:
    for opening, closing in (
        CELL,
        FENCE,
        (r"<code>\s*```python", r"```\s*</code>"),
        ("<a>", "</a>"),
    ):
        assert Enclosed(opening, closing).findall(text) == re.findall(
            f"{opening}(.*?){closing}", text, re.DOTALL
        )
    whole = "<tool_call>(.*?)</tool_call>"
    assert bodies(text) == re.findall(whole, text, re.DOTALL)
    assert without_calls(text) == re.sub(whole, "", text, flags=re.DOTALL).strip()


def test_a_tag_is_no_pattern() -> None:
    assert tagged("a.b").findall("<a.b>1</a.b><axb>2</axb>") == ["1"]
