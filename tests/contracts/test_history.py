"""What every history policy must do: the shipped ones, the languages', and one of a user's.

A new policy is added to ``POLICIES``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloop.core.types import ImageSource, Message
from rayloop.envs.grammar.language import action_format, names
from rayloop.envs.history.past import AnswerReader, Past, PastAnswer, Shown
from rayloop.envs.history.policies import Window


class FirstAndLast:
    """A user's own: the first exchange and the last one."""

    def shown(self, past: Past) -> Shown:
        first, last = past.exchanges[:1], past.exchanges[1:][-1:]
        return Past(past.first, (*first, *last)).everything


def window(**options: Any) -> Window:
    return Window(Window.Settings.model_validate(options))


POLICIES: dict[str, Any] = {
    "full": window(),
    "drop_thoughts": window(answers="{action}"),
    "last_images(1)": window(last_images=1),
    "last_images(3)": window(last_images=3),
    "last_turns(1)": window(last_turns=1),
    "last_turns(4)": window(last_turns=4),
    "all": window(last_turns=4, last_images=2, answers="{summary}"),
    "a user's": FirstAndLast(),
    **{name: window(**action_format(name).history("computer")) for name in names()},
    **{f"{name} on a phone": window(**action_format(name).history("phone")) for name in names()},
}
TEXTS = st.sampled_from(
    ["press", "<think>why</think>press", "Thought: x\nAction: wait()", "{summary}", "", "</think>"]
)
OBSERVATIONS = st.lists(
    st.tuples(
        st.sampled_from(["user", "tool"]),
        st.lists(st.one_of(st.just("text"), st.integers(0, 9)), max_size=3),
    ),
    min_size=1,
    max_size=2,
)


def image(number: int) -> ImageSource:
    return ImageSource(data=b"image %d" % number)


def message(role: str, parts: list[Any]) -> Message:
    return Message(role, tuple(part if isinstance(part, str) else image(part) for part in parts))


@st.composite
def pasts(draw: Any) -> Past:
    first = (
        Message("system", ("be quick",)),
        message("user", ["send it", draw(st.integers(0, 9))]),
    )
    past = Past(first, task_images=tuple(draw(st.sampled_from([(), (image(0),)]))))
    reader = AnswerReader(draw(st.sampled_from(["", "ui_tars", "qwen3_vl"])))
    for number in range(draw(st.integers(0, 7))):
        answer = reader.answer(number, draw(TEXTS))
        observation = [message(role, parts) for role, parts in draw(OBSERVATIONS)]
        past = past.followed_by(answer, observation)
    return past


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(past=pasts())
def test_a_policy_keeps_the_contract(name: str, past: Past) -> None:
    policy = POLICIES[name]
    before = copy.deepcopy(past)
    shown = list(policy.shown(past))
    assert list(policy.shown(past)) == shown, "the same past gives the same"
    assert past == before, "what it is given stays as it is"

    for end in (shown[0], shown[-1]):
        assert isinstance(end, Message)
        assert end.role != "assistant"
    answers = [exchange.answer for exchange in past.exchanges]
    unchanged = [one for one in shown if isinstance(one, PastAnswer)]
    assert unchanged == [answer for answer in answers if answer in unchanged], "in their order"

    given_images = [one for message in _messages(past.everything) for one in message.images]
    shown_images = [one for message in _messages(shown) for one in message.images]
    assert set(shown_images) <= set(given_images), "no image that was not there"
    newest = past.exchanges[-1].messages if past.exchanges else past.first
    texts = "".join(part for part in shown[-1].parts if isinstance(part, str))
    last_texts = "".join(part for part in newest[-1].parts if isinstance(part, str))
    assert last_texts in texts, "the newest observation is shown"


def _messages(shown: Shown) -> list[Message]:
    return [one for one in shown if isinstance(one, Message)]
