"""What the chats of an agent become: the turns of one trajectory, whose parts are what the engine
saw.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayloop.chat.openai.api import ChatRequest, answer_of
from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.failures import DataFailure, EnvironmentFailed, OverLongPrompt, WorkerLost
from rayloop.core.groups import Member, Scored
from rayloop.core.types import (
    Completion,
    EndReason,
    FinishReason,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.data.images import data_url
from rayloop.envs.agents.endpoint import Endpoint
from rayloop.envs.agents.session import Session
from rayloop.envs.episode import summarize
from rayloop.envs.settings import EpisodeSettings
from rayloop.grpo.advantage_kinds import turn_returns
from tests.support.pictures import picture

CALLED = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
ADD = {"type": "function", "function": {"name": "add"}}
RENDERER = Renderer(ModelSettings(path=str(Path(__file__).parents[3] / "recipes/arc_vision/loose")))


class Talk:
    """A session whose engine says numbers, and keeps what it was asked."""

    def __init__(self, **settings: Any) -> None:
        task = Task("t", (Message("user", ("hello",)),))
        request = RolloutRequest(
            task, TrajectoryId(0, 0), 0, 5, Sampling(temperature=0.7, max_tokens=9)
        )
        episode = EpisodeSettings(**{"max_turns": 20, "max_tokens": 400, **settings})
        self.session = Session(request, RENDERER, episode, self.generate, "m")
        self.asked: list[tuple[TokenPrompt, Sampling]] = []
        self.error: Exception | None = None
        self.text = ""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        self.asked.append((prompt, sampling))
        number = len(self.asked)
        await asyncio.sleep(0.001 * (number % 3))
        if self.error is not None:
            raise self.error
        tokens = RENDERER.encode(self.text or f"said {number}")
        return Completion(tokens, (-0.5,) * len(tokens), FinishReason.END_TOKEN, Version(0, 1))

    async def say(self, messages: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
        """Returns the assistant's message."""
        answer = await self.session.chat(
            ChatRequest.model_validate({"model": "m", "messages": messages, **keys})
        )
        message: dict[str, Any] = answer["choices"][0]["message"]
        return {**message, "id": f"{answer['id']}/0"}

    def trajectory(self) -> Trajectory:
        return self.session.trajectory(EndReason.DONE, None)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": message["content"]}


def talk(script: Callable[[Talk], Awaitable[None]], **settings: Any) -> Talk:
    async def run() -> Talk:
        made = Talk(**settings)
        await script(made)
        return made

    return asyncio.run(run())


def assert_what_the_engine_saw(made: Talk) -> None:
    """Each sampled turn is in the trajectory once, and what stands before it in its segment is the
    prompt that was sampled from.
    """
    seen = []
    for segment in made.trajectory().segments:
        tokens: tuple[int, ...] = ()
        for turn in segment.turns:
            if turn.sampled:
                seen.append((tokens, turn.token_ids))
            tokens += turn.token_ids
    asked = [
        (prompt.token_ids, RENDERER.encode(f"said {number}"))
        for number, (prompt, _) in enumerate(made.asked, 1)
    ]
    assert sorted(seen) == sorted(asked)


async def straight(made: Talk) -> None:
    first = await made.say([user("a")])
    second = await made.say([user("a"), said(first), user("b")])
    await made.say([user("a"), said(first), user("b"), said(second), user("c")])


async def rewritten(made: Talk) -> None:
    """Compaction: the agent replaces its history by a summary."""
    first = await made.say([user("a long story")])
    second = await made.say([user("a long story"), said(first), user("b")])
    await made.say([user("a summary"), said(second), user("c")])


async def parallel(made: Talk) -> None:
    """Two sub-agents at once, and the main conversation before and after them."""
    first = await made.say([user("a")])
    await asyncio.gather(straight(made), made.say([user("x")]), made.say([user("y")]))
    await made.say([user("a"), said(first), user("d")])


async def choices(made: Talk) -> None:
    """Three answers to one question, of which the second is continued."""
    answer = await made.session.chat(
        ChatRequest.model_validate({"model": "m", "messages": [user("a")], "n": 3})
    )
    await made.say([user("a"), said(answer["choices"][1]["message"]), user("b")])


async def regenerated(made: Talk) -> None:
    """A tree: two questions after one answer, and the same question twice."""
    first = await made.say([user("a")])
    await made.say([user("a"), said(first), user("b")])
    await made.say([user("a"), said(first), user("c")])
    await made.say([user("a")])


@pytest.mark.parametrize(
    ("script", "segments"),
    [(straight, 1), (rewritten, 2), (parallel, 4), (choices, 3), (regenerated, 3)],
)
def test_the_trajectory_is_what_the_engine_saw(
    script: Callable[[Talk], Awaitable[None]], segments: int
) -> None:
    made = talk(script)
    assert_what_the_engine_saw(made)
    assert len(made.trajectory().segments) == segments


def test_a_conversation_that_does_not_go_on_is_no_context_of_the_next() -> None:
    made = talk(rewritten)
    _, second = made.trajectory().segments
    assert [(turn.role, turn.sampled, turn.restart) for turn in second.turns] == [
        ("context", False, True),
        ("prompt", False, False),
        ("assistant", True, False),
    ]
    assert second.turns[0].token_ids == ()
    assert len(made.trajectory().states) == 3, (
        "each sampled turn has a state, that of the rewritten history is its prompt"
    )


def test_the_runs_sampling_holds_whatever_the_agent_asks_for() -> None:
    async def script(made: Talk) -> None:
        await made.say(
            [user("a")], temperature=0, top_p=0.1, max_tokens=4, stop=["X"], frequency_penalty=1.5
        )
        await made.say([user("b")], max_tokens=4000)

    (_, first), (_, second) = talk(script).asked
    assert (first.temperature, first.top_p, first.max_tokens, first.stop) == (0.7, 1.0, 4, ("X",))
    assert (second.temperature, second.max_tokens, second.stop) == (0.7, 9, ())


@pytest.mark.parametrize(
    "wish",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "object"}},
            }
        },
        {"store": True, "service_tier": "auto", "prompt_cache_key": "x", "reasoning_effort": "low"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    ],
)
def test_what_an_agent_wishes_of_the_answer_s_form_is_left_to_the_policy(
    wish: dict[str, Any],
) -> None:
    async def script(made: Talk) -> None:
        wished = await made.say([user("a")], tools=[ADD], **wish)
        plain = await made.say([user("a")], tools=[ADD])
        assert (wished["content"], plain["content"]) == ("said 1", "said 2")

    wished, plain = talk(script).asked
    assert (wished[0].token_ids, wished[1]) == (plain[0].token_ids, plain[1])


def test_keys_that_clients_add_to_parts_of_a_message_change_nothing() -> None:
    def shows(**keys: Any) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": data_url(picture(40, 40)), **keys}}
        text = {"type": "text", "text": "what?"}
        if keys:
            image["cache_control"] = text["cache_control"] = {"type": "ephemeral"}
        return {"role": "user", "content": [image, text]}

    async def script(made: Talk) -> None:
        for keys in ({}, {"detail": "auto"}, {"detail": "high"}):
            await made.say([shows(**keys)])

    first, *others = (prompt.token_ids for prompt, _ in talk(script, max_tokens=4000).asked)
    assert others == [first, first]


def test_a_long_part_of_a_message_is_bounded_by_the_episode_alone() -> None:
    """The tree of a web page has more than 65,536 characters."""

    async def script(made: Talk) -> None:
        await made.say([{"role": "user", "content": [{"type": "text", "text": " a" * 70_000}]}])

    ((prompt, _),) = talk(script, max_tokens=400_000, max_prompt_tokens=300_000).asked
    assert len(prompt.token_ids) > 70_000


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ('{"a": 2, "b": [1, 1.5]}', '{"a":2,"b":[1,1.5]}'),
        ('{"a": 2, "b": 3}', '{"b":3,"a":2}'),
        ('{"a": 1.0}', '{"a":1}'),
    ],
)
def test_a_call_that_a_client_writes_again_as_other_json_is_the_same_call(
    given: str, sent: str
) -> None:
    async def script(made: Talk) -> None:
        made.text = CALLED % given
        first = await made.say([user("a")], tools=[ADD])
        (call,) = first["tool_calls"]
        call["function"]["arguments"] = sent
        history = [user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        await made.say([*history, result], tools=[ADD])
        call["function"]["arguments"] = '{"a": 3}'
        await made.say([*history, result], tools=[ADD])

    played = talk(script, max_tokens=4000).trajectory()
    assert len(played.segments) == 2, "the third request has another call"
    assert len(played.segments[0].sampled_turns) == 2


def test_a_seed_depends_on_what_is_asked_and_not_on_when() -> None:
    async def one(made: Talk) -> None:
        for text in "aba":
            await made.say([user(text)], seed=1)

    async def other(made: Talk) -> None:
        for text in "baa":
            await made.say([user(text)], seed=2)

    first, second = ([prompt.seed for prompt, _ in talk(script).asked] for script in (one, other))
    assert len(set(first)) == 3
    assert second == [first[1], first[0], first[2]]


@pytest.mark.parametrize(
    ("settings", "limit", "error"),
    [
        ({"max_turns": 2}, EndReason.MAX_TURNS, DataFailure),
        ({"max_tokens": 70}, EndReason.OVER_LENGTH, OverLongPrompt),
    ],
)
def test_a_limit_of_the_episode_is_an_error_for_the_agent(
    settings: dict[str, Any], limit: EndReason, error: type[Exception]
) -> None:
    async def script(made: Talk) -> None:
        async def on_and_on() -> None:
            history = [user("a" * 20)]
            for _ in range(9):
                history += [said(await made.say(history)), user("b" * 20)]

        with pytest.raises(error):
            await on_and_on()
        assert made.session.limit is limit

    made = talk(script, **settings)
    assert_what_the_engine_saw(made)


def test_requests_at_once_share_the_limit_of_answers() -> None:
    async def script(made: Talk) -> None:
        answers = await asyncio.gather(
            *(made.say([user(str(n))]) for n in range(6)), return_exceptions=True
        )
        assert [isinstance(answer, DataFailure) for answer in answers] == [
            False,
            False,
            True,
            True,
            True,
            True,
        ]

    assert len(talk(script, max_turns=2).asked) == 2


def test_a_request_that_is_refused_costs_no_answer() -> None:
    async def script(made: Talk) -> None:
        with pytest.raises(OverLongPrompt):
            await made.say([user("a"), {"role": "assistant", "content": "b" * 900}, user("c")])
        await made.say([user("a")])

    assert len(talk(script, max_turns=1, max_prompt_tokens=4000).asked) == 1


def test_images_beyond_the_limit_end_with_that_reason() -> None:
    async def script(made: Talk) -> None:
        url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(DataFailure, match="2 images, 1 are allowed"):
            await made.say([{"role": "user", "content": [url, url]}])
        assert made.session.limit is EndReason.MAX_IMAGES

    talk(script, max_images=1)


def test_a_first_prompt_that_is_too_long_and_a_lost_engine_make_the_episode_worthless() -> None:
    async def long(made: Talk) -> None:
        with pytest.raises(OverLongPrompt):
            await made.say([user("a" * 4000)])
        assert isinstance(made.session.failed.result(), OverLongPrompt)

    async def lost(made: Talk) -> None:
        made.error = WorkerLost("gone")
        with pytest.raises(WorkerLost):
            await made.say([user("a")])
        assert made.session.failed.result() is made.error

    talk(long, max_prompt_tokens=50)
    talk(lost)


def test_rewards_of_the_episode_and_of_one_answer() -> None:
    async def script(made: Talk) -> None:
        first = await made.say([user("a")])
        await made.say([user("a"), said(first), user("b")])
        assert made.session.pay(0.25, first["id"]) == ""
        assert "has its reward already: 0.25" in made.session.pay(1.0, first["id"])
        assert "was not given in this episode" in made.session.pay(1.0, "chatcmpl-x/0")
        assert made.session.pay(0.5, None) == ""
        assert "has its reward already: 0.5" in made.session.pay(1.0, None)

    made = talk(script)
    assert [turn.reward for turn in made.trajectory().sampled_turns] == [0.25, 0.0]
    assert made.session.reward == 0.5


def test_an_agent_that_never_asked_has_no_trajectory() -> None:
    async def script(made: Talk) -> None:
        made.session.refused = "404 no such model"

    with pytest.raises(
        EnvironmentFailed,
        match="without an answer of the policy; its last request was refused: 404",
    ):
        talk(script).trajectory()


def test_what_still_runs_at_the_end_is_refused() -> None:
    async def script(made: Talk) -> None:
        asking = asyncio.create_task(made.say([user("a")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        made.session.close()
        with pytest.raises(DataFailure, match="the episode is over"):
            await asking

    talk(script)


def test_the_endpoints_sockets_name_their_protocol() -> None:
    """Or asyncio leaves Nagle's algorithm on, which holds back an answer for 40 ms."""

    async def script(made: Talk) -> None:
        endpoint = Endpoint()
        async with endpoint.serving(made.session):
            assert endpoint._server is not None
            assert [one.proto for server in endpoint._server.servers for one in server.sockets] == [
                socket.IPPROTO_TCP
            ]
        endpoint.end()

    talk(script)


def test_turns_stand_by_conversation_and_know_their_order_in_time() -> None:
    """A main agent asks a sub-agent, which answers twice, and goes on; each answer is of newer
    weights.
    """

    async def script(agent: Talk) -> None:
        first = await agent.say([user("main")])
        second = await agent.say([user("for the sub-agent")])
        await agent.say([user("for the sub-agent"), said(second), user("go on")])
        await agent.say([user("main"), said(first), user("the sub-agent said ...")])

    played = talk(script).trajectory()
    asked = [int(RENDERER.decode(turn.token_ids).split()[-1]) for turn in played.sampled_turns]
    assert asked == [2, 3, 1, 4]
    assert played.order == (2, 0, 1, 3)
    turns = iter(
        [
            replace(turn, version=Version(0, n))
            for turn, n in zip(played.sampled_turns, asked, strict=True)
        ]
    )
    played = replace(
        played, turns=tuple(next(turns) if turn.sampled else turn for turn in played.turns)
    )
    summary = summarize(played, Task("t", ()), 1.0, RENDERER.image_token)
    assert (summary.first_version, summary.last_version) == (Version(0, 1), Version(0, 4))
    returns = turn_returns(Member(summary, Scored(1.0)), 0.95)
    assert dict(zip(asked, returns, strict=True)) == pytest.approx(
        {1: 0.95**3, 2: 0.95**2, 3: 0.95, 4: 1.0}
    )


def test_turns_that_stand_as_they_were_asked_need_no_order() -> None:
    async def script(agent: Talk) -> None:
        first = await agent.say([user("one")])
        await agent.say([user("one"), said(first), user("two")])
        await agent.say([user("anew")])

    assert talk(script).trajectory().order == ()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (CALLED % '{"a": 2}', '{"a": 2}'),
        (CALLED % '"{\\"a\\": 2}"', '{"a": 2}'),
        (CALLED % '{"b": "x"}', '{"b": "x"}'),
        ('<tool_call>{"name": "add"}</tool_call>', "{}"),
        (CALLED % '"a"', None),
        (CALLED % "[1]", None),
        (CALLED % "null", None),
        (CALLED % '{"a": NaN}', None),
        (CALLED % '{"a": 1e999}', None),
        (CALLED % '{"a": "\\ud800"}', None),
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": null, "arguments": {}}</tool_call>', None),
        (CALLED % "{}" + '<tool_call>{"name": "add", "arg</tool_call>', None),
        (CALLED % "{}" * 65, None),
        (CALLED % f'{{"a": "{"x" * 1_000_001}"}}', None),
    ],
)
def test_a_call_that_a_client_cannot_take_stays_a_text(text: str, arguments: str | None) -> None:
    message = answer_of(text, {"add"})
    if arguments is None:
        assert (message.tool_calls, message.content) == (None, text)
    else:
        assert message.tool_calls is not None
        assert [call.function.arguments for call in message.tool_calls] == [arguments]
    assert answer_of(text, ()).content == text


def test_a_picture_that_an_answer_led_to_is_a_limit_of_the_episode() -> None:
    def shows(width: int, height: int) -> dict[str, Any]:
        url = data_url(picture(width, height))
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    async def script(made: Talk) -> None:
        with pytest.raises(DataFailure, match="aspect ratio"):
            await made.say([shows(10, 4000)])
        assert made.session.limit is None, "the policy has not answered yet"
        first = await made.say([user("hello")])
        with pytest.raises(DataFailure, match="aspect ratio"):
            await made.say([user("hello"), said(first), shows(10, 4000)])

    assert talk(script, max_tokens=4000).session.limit is EndReason.ACTION_ERROR
