"""The endpoint without Ray: what a chat becomes, how a history goes on, what an answer says;
engines follow a script.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from rayloop.config.model import ModelSettings
from rayloop.core.failures import WorkerLost
from rayloop.core.traces import Trace, branches
from rayloop.core.types import (
    Completion,
    FinishReason,
    Sampling,
    TokenPrompt,
    TrajectoryId,
    Version,
)
from rayloop.serve_apps.policy.app import web
from rayloop.serve_apps.policy.engines import Engines
from rayloop.serve_apps.policy.service import PolicyService
from rayloop.serve_apps.settings import PolicyEndpointSettings

MODEL = ModelSettings(path=str(Path(__file__).parents[3] / "recipes/arc_vision/loose"))
BROKEN = {"function": {"name": "f", "arguments": "{"}}
CALL = '<tool_call>{"name": "zoom", "arguments": {"box": [1, 2]}}</tool_call>'


class Scripted:
    """In place of ``Engines``: answers with the next of ``texts``, token by token or as ``tokens``
    says.
    """

    def __init__(self) -> None:
        self.texts: list[str | tuple[int, ...]] = []
        self.finish = FinishReason.END_TOKEN
        self.version: Version | None = Version(0, 4)
        self.why, self.failure, self.seconds = "", cast(Exception | None, None), 0.0
        self.asked: list[tuple[TokenPrompt, Sampling]] = []
        self.service: PolicyService

    @property
    def serving(self) -> list[str]:
        return ["one"]

    async def __aenter__(self) -> Scripted:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def sample(
        self, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        self.asked.append((prompt, sampling))
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        said = [self.texts.pop(0) for _ in seeds]
        each = [
            one if isinstance(one, tuple) else self.service.renderer.encode(one) for one in said
        ]
        assert self.version is not None
        return [Completion(ids, (-0.5,) * len(ids), self.finish, self.version) for ids in each]


@pytest.fixture
def engines() -> Scripted:
    return Scripted()


@pytest.fixture
def http(engines: Scripted) -> Iterator[TestClient]:
    limits = {"seconds": 3.0, "held": 2, "choices": 4}
    settings = PolicyEndpointSettings.model_validate(
        {
            "run": "r",
            "namespace": "n",
            "model": MODEL,
            "insecure": True,
            "tokens": 600,
            "images": 2,
            "limits": limits,
        }
    )
    engines.service = PolicyService(settings, cast(Engines, engines))
    with TestClient(web(engines.service, ""), "http://localhost") as client:
        yield client


def picture(red: int) -> dict[str, Any]:
    encoded = io.BytesIO()
    Image.new("RGB", (56, 56), (red, 0, 0)).save(encoded, "PNG")
    return {
        "type": "image_url",
        "image_url": {
            "url": "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
        },
    }


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts],
    }


def asked(http: TestClient, *messages: dict[str, Any], **keys: Any) -> dict[str, Any]:
    body = {
        "model": "r",
        "messages": list(messages),
        "logprobs": True,
        "return_token_ids": True,
        **keys,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


TOOLS = [
    {
        "type": "function",
        "function": {"name": "zoom", "description": "d", "parameters": {"type": "object"}},
    }
]


def test_a_history_goes_on_with_the_tokens_that_were_sampled(
    http: TestClient, engines: Scripted
) -> None:
    encode = engines.service.renderer.encode
    split = tuple(token for letter in "about" for token in encode(letter))
    assert split != encode("about"), "another tokenisation of the same text"
    engines.texts = [split, "six"]
    first = asked(http, user("look", picture(3)))
    said = first["choices"][0]["message"]
    assert said["content"] == "about"
    second = asked(http, user("look", picture(3)), said, user("and now", picture(4)))
    known = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(known)] == known
    assert second["rayloop"]["history"] == {
        "exact": True,
        "continues": f"{first['id']}/0",
        "why": None,
    }
    assert len(second["rayloop"]["images"]) == 2
    assert len(engines.asked[1][0].images) == 2

    trace = http.get(f"/v1/traces/{second['id']}/0").json()
    made = Trace.from_json(trace).trajectory(
        TrajectoryId(0, 0),
        "t",
        Sampling(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in trace["sampling"].items()}
        ),
        image_token=trace["image_token"],
    )
    assert [turn.sampled for turn in made.turns] == [False, True, False, True]
    assert [len(turn.images) for turn in made.turns] == [1, 0, 1, 0]
    assert set(made.image_bytes) == {image.sha256 for image in made.images}
    (again,) = branches([first, second])
    assert (again.token_ids, again.sampled_mask) == (
        tuple(made.flatten().token_ids.tolist()),
        tuple(made.flatten().loss_mask.tolist()),
    )


def test_a_changed_history_is_rendered_again_and_the_answer_says_where(
    http: TestClient, engines: Scripted
) -> None:
    engines.texts = ["one two", "x", "y"]
    first = asked(http, user("count"))
    other = asked(http, user("count"), {"role": "assistant", "content": "one three"}, user("go on"))
    history = other["rayloop"]["history"]
    assert (history["exact"], history["continues"]) == (False, None)
    assert "messages[1] is not the answer that was given" in history["why"]
    equal = int(history["why"].split("first ")[1].split(" ")[0])
    assert (
        len(first["prompt_token_ids"])
        <= equal
        < len(first["prompt_token_ids"] + first["choices"][0]["token_ids"])
    )
    stranger = asked(http, user("hello"), {"role": "assistant", "content": "hm"}, user("go on"))
    assert "were not given here" in stranger["rayloop"]["history"]["why"]
    refused = http.get(f"/v1/traces/{other['id']}/0")
    assert (refused.status_code, "messages[1]" in refused.json()["error"]["message"]) == (400, True)


def test_the_same_text_of_two_answers_is_distinguished_by_name(
    http: TestClient, engines: Scripted
) -> None:
    encode = engines.service.renderer.encode
    split = tuple(token for letter in "about" for token in encode(letter))
    engines.texts = [split, "about", "x", "y"]
    two = asked(http, user("say"), n=2)
    said = two["choices"][0]["message"]
    for choice in (0, 1):
        more = asked(http, user("say"), said, user("go on"), continues=f"{two['id']}/{choice}")
        known = two["prompt_token_ids"] + two["choices"][choice]["token_ids"]
        assert more["prompt_token_ids"][: len(known)] == known
    body = {
        "model": "r",
        "messages": [user("other"), said, user("go on")],
        "continues": f"{two['id']}/0",
    }
    assert (
        "are not the ones before"
        in http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    )
    body["continues"] = "chatcmpl-x/0"
    assert "is not known" in http.post("/v1/chat/completions", json=body).json()["error"]["message"]


def test_calls_of_tools_are_openais_and_come_back_as_the_tokens_that_they_were(
    http: TestClient, engines: Scripted
) -> None:
    engines.finish = FinishReason.STOP_STRING
    engines.texts = [
        f"look {CALL}",
        "<tool_call>{broken</tool_call>",
        f"look {CALL}",
        f"look {CALL}",
    ]
    keys: dict[str, Any] = {"tools": TOOLS, "stop": ["</tool_call>"]}
    first = asked(http, user("q"), **keys)
    (choice,) = first["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")
    assert choice["message"]["content"] == "look"
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "zoom",
        {"box": [1, 2]},
    )
    shown = {"role": "tool", "tool_call_id": call["id"], "content": "a zoom"}
    second = asked(http, user("q"), choice["message"], shown, **keys)
    assert second["rayloop"]["history"]["exact"]
    known = first["prompt_token_ids"] + choice["token_ids"]
    assert second["prompt_token_ids"][: len(known)] == known
    (broken,) = second["choices"]
    assert (broken["finish_reason"], broken["message"]["content"]) == ("stop", "<tool_call>{broken")
    without = asked(http, user("q"), stop="</tool_call>")["choices"][0]
    assert without["message"]["content"] == f"look {CALL}".removesuffix("</tool_call>")
    whole = asked(http, user("q"), stop="</tool_call>", include_stop_str_in_output=True)["choices"][
        0
    ]
    assert whole["message"]["content"] == f"look {CALL}"


def test_what_a_request_leaves_out_is_the_runs_sampling(
    http: TestClient, engines: Scripted
) -> None:
    engines.texts = ["a"] * 4
    asked(http, user("q"))
    asked(
        http,
        user("q"),
        temperature=0,
        max_tokens=5,
        min_tokens=2,
        stop="x",
        top_p=1,
        stream=False,
        user="me",
    )
    asked(http, user("q"), max_completion_tokens=10_000)
    asked(http, user("q"), temperature=1.9e-39)
    plain, own, most, cold = (sampling for _, sampling in engines.asked)
    renderer = engines.service.renderer
    assert (plain.temperature, plain.max_tokens, plain.end_tokens) == (1.0, 64, renderer.end_tokens)
    assert plain.banned_tokens == renderer.sampling(Sampling()).banned_tokens
    assert (own.temperature, own.max_tokens, own.min_tokens, own.stop) == (0.0, 5, 2, ("x",))
    prompt = engines.asked[0][0].token_ids
    assert most.max_tokens == 600 - len(prompt), "what is left of an episode"
    assert cold.temperature == 0.0, "logits that are divided by so little are not finite"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"stream": True, "top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options without stream"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats",
        ),
        ({"top_p": 0.5}, "top_p"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tool_choice": "required", "tools": TOOLS},
            "tool_choice: 'required' is not supported, only 'auto'",
        ),
        ({"unheard_of": 1}, "unheard_of"),
        ({"n": 5}, "limits.choices"),
        ({"messages": []}, "messages"),
        ({"messages": [user("q"), {"role": "assistant", "content": "a"}]}, "nothing to answer"),
        ({"messages": [user(picture(1), picture(2), picture(3))]}, "3 images"),
        (
            {
                "messages": [
                    user({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})
                ]
            },
            "image_url",
        ),
        (
            {
                "messages": [
                    user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
                ]
            },
            "not a readable",
        ),
        (
            {
                "messages": [
                    user({"type": "image_url", "image_url": {"url": "data:image/png;base64,A==="}})
                ]
            },
            "not base64",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN]}, user("q")]}, "not JSON"),
        ({"messages": [{"role": "user", "content": "q", "reasoning": "x"}]}, "reasoning"),
        ({"messages": [{"role": "user"}]}, "without content"),
        ({"messages": [user("word " * 700)]}, "tokens, the limit is 599"),
        ({"continues": "x/0"}, "is not known"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_openais_form(
    http: TestClient, keys: dict[str, Any], why: str
) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "r", "messages": [user("q")], **keys})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert why in error["message"]


def test_a_stream_is_the_same_answer_in_chunks(http: TestClient, engines: Scripted) -> None:
    engines.texts = ["about", "six", "about", "six"]
    plain = asked(http, user("q"), n=2, seed=1)
    body = {
        "model": "r",
        "messages": [user("q")],
        "n": 2,
        "seed": 1,
        "logprobs": True,
        "return_token_ids": True,
    }
    streamed = http.post(
        "/v1/chat/completions",
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = streamed.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *said, last = chunks
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    assert all(chunk["usage"] is None for chunk in said)
    assert said[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    assert said[0]["rayloop"] == plain["rayloop"]
    for choice in plain["choices"]:
        begin, end = (
            c for chunk in said for c in chunk["choices"] if c["index"] == choice["index"]
        )
        assert begin["delta"] == {"role": "assistant", "content": choice["message"]["content"]}
        assert all(begin[key] == choice[key] for key in ("token_ids", "logprobs", "weight_version"))
        assert (begin["finish_reason"], end["finish_reason"], end["delta"]) == (None, "stop", {})
    failed = http.post("/v1/chat/completions", json={**body, "stream": True, "n": 5})
    assert failed.status_code == 400, "a failure is known before the stream begins"


def test_the_official_client_reads_a_stream_with_calls(http: TestClient, engines: Scripted) -> None:
    openai = pytest.importorskip("openai", reason="`make test-judge` installs it")
    engines.texts = [f"look {CALL}"]
    client = openai.OpenAI(
        base_url="http://localhost/v1", api_key="k", http_client=http, max_retries=0
    )
    keys = {"logprobs": True, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(
        model="r", messages=[user("q")], tools=TOOLS, **keys
    ) as stream:
        answer = stream.get_final_completion()
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason, call.function.name) == (
        "look",
        "tool_calls",
        "zoom",
    )
    assert json.loads(call.function.arguments) == {"box": [1, 2]}
    assert answer.usage.completion_tokens == len(choice.logprobs.content) > 0


def test_metrics_count_requests_and_tokens(http: TestClient, engines: Scripted) -> None:
    engines.texts = ["about"]
    answer = asked(http, user("q"))
    assert (
        http.post(
            "/v1/chat/completions", json={"model": "r", "messages": [user("q")], "n": 5}
        ).status_code
        == 400
    )
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = page.text.splitlines()
    usage = answer["usage"]
    for line in (
        'policy_requests_total{outcome="ok",route="chat",run="r"} 1.0',
        'policy_requests_total{outcome="DataFailure",route="chat",run="r"} 1.0',
        f'policy_prompt_tokens_total{{run="r"}} {float(usage["prompt_tokens"])}',
        f'policy_sampled_tokens_total{{run="r"}} {float(usage["completion_tokens"])}',
        'policy_engines{run="r"} 1.0',
        'policy_weight_step{run="r"} 4.0',
        'policy_queue{run="r"} 0.0',
    ):
        assert line in lines, line


def test_failures_of_engines_are_503_and_have_a_deadline(
    http: TestClient, engines: Scripted
) -> None:
    body = {"model": "r", "messages": [user("q")]}
    engines.failure = WorkerLost("gone")
    lost = http.post("/v1/chat/completions", json=body)
    engines.failure, engines.seconds = None, 60.0
    late = http.post("/v1/chat/completions", json=body)
    assert [(a.status_code, a.json()["error"]["code"]) for a in (lost, late)] == [
        (503, "unavailable"),
        (503, "timeout"),
    ]
    assert late.headers["retry-after"] == "1"
    engines.why = "the run has no engine"
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["failing"]) == (
        503,
        {"engines": "the run has no engine"},
    )
    assert (
        http.post("/v1/chat/completions", json={**body, "model": "gpt"}).json()["error"]["code"]
        == "model_not_found"
    )


def test_more_answers_than_it_holds_are_turned_away(http: TestClient, engines: Scripted) -> None:
    async def both() -> list[int]:
        import httpx

        transport = httpx.ASGITransport(app=http.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"model": "r", "messages": [user("q")], "n": 2}
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", json=body) for _ in range(3))
            )
            return sorted(answer.status_code for answer in answers)

    engines.seconds, engines.texts = 0.3, ["a"] * 8
    assert asyncio.run(both()) == [200, 503, 503]
