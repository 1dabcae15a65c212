"""An engine over HTTP against a real small server: tokens as from the engine behind it, and
messages as in the prompt.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rayloop.chat.rendering import Renderer
from rayloop.core.failures import ConfigError, DataFailure, WeightSyncError, WorkerLost
from rayloop.core.types import FinishReason, ImageSource, Message, Sampling, TokenPrompt, Version
from rayloop.engines.generation import openai_requests
from rayloop.engines.generation.openai_http import OpenAiHttpEngine
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.settings import EnginePlace, ModelSettings, OpenAiHttpEngineSettings
from rayloop.transports.manifest import manifest
from tests.engines.prompts import engine, image, prompt, special
from tests.support.openai_server import Server, serving
from tests.support.storage import keeps_folders

UPDATE = {"/load": {"model_path": "{folder}"}}


@pytest.fixture
def server(tiny_text: Path) -> Iterator[Server]:
    with serving(tiny_text) as running:
        yield running


def client(server: Server, model: Path, folder: Path, **changes: Any) -> OpenAiHttpEngine:
    settings = {"base_url": f"{server.url}/v1/", "model": "served", **changes}
    return OpenAiHttpEngine(
        ModelSettings(path=str(model)),
        OpenAiHttpEngineSettings.model_validate(settings),
        EnginePlace(str(folder)),
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_requests, "REQUEST_ATTEMPTS", 2)


def run(play: Callable[[], Awaitable[Any]]) -> Any:
    async def within() -> Any:
        async with asyncio.timeout(60):
            return await play()

    return asyncio.run(within())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.0, 12),
        Sampling(0.7, 12, min_tokens=4),
        Sampling(1.0, 12, stop=("e",)),
        Sampling(1.0, 3),
        Sampling(1.0, 3, min_tokens=8),
    ],
)
def test_tokens_and_logprobs_are_those_of_the_engine_behind_it(
    sampling: Sampling, server: Server, tiny_text: Path, tmp_path: Path
) -> None:
    asked = dataclasses.replace(prompt(tiny_text, "What is 3 + 9?"), seed=2**62 + 5)
    sampling = dataclasses.replace(
        sampling, end_tokens=special(tiny_text, "<|im_end|>"), banned_tokens=(7, 9)
    )

    async def play() -> None:
        served = client(server, tiny_text, tmp_path, interface="tokens")
        direct = await engine(tiny_text)
        assert await served.generate(asked, sampling) == await direct.generate(asked, sampling)
        direct.close()

    run(play)


def test_published_weights_are_loaded_by_the_server(
    server: Server, tiny_text: Path, tmp_path: Path
) -> None:
    asked, sampling = prompt(tiny_text, "What is 3 + 9?"), Sampling(0.0, 12)
    weights = {
        n: t.clone() for n, t in hf_state(load_model(ModelSettings(path=str(tiny_text)))).items()
    }

    async def play() -> None:
        served = client(server, tiny_text, tmp_path, interface="tokens", update=UPDATE)
        await served.load(manifest(Version(0, 1), weights), weights)
        before = await served.generate(asked, sampling)
        generator = torch.Generator().manual_seed(0)
        changed = {
            n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in weights.items()
        }
        await served.load(manifest(Version(0, 2), changed), changed)
        after = await served.generate(asked, sampling)
        direct = await engine(tiny_text)
        await direct.load(manifest(Version(0, 2), changed), changed)
        assert after == await direct.generate(asked, sampling)
        assert (before.version, after.version) == (Version(0, 1), Version(0, 2))
        assert before.logprobs != after.logprobs
        assert [folder.name for folder in (tmp_path / "server").iterdir()] == ["weights-0.2"]
        direct.close()
        server.loads = False
        with pytest.raises(
            WeightSyncError, match=r"version 0\.3: .*/load answered .*as the test wants it"
        ):
            await served.load(manifest(Version(0, 3), weights), weights)
        with pytest.raises(WorkerLost, match="the last load failed"):
            await served.generate(asked, sampling)

    run(play)


def test_weights_are_loaded_though_those_of_the_last_version_cannot_be_removed(
    server: Server, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {
        n: t.clone() for n, t in hf_state(load_model(ModelSettings(path=str(tiny_text)))).items()
    }

    async def play() -> None:
        served = client(server, tiny_text, tmp_path, interface="tokens", update=UPDATE)
        await served.load(manifest(Version(0, 1), weights), weights)
        with monkeypatch.context() as patch:
            keeps_folders(patch)
            await served.load(manifest(Version(0, 2), weights), weights)
        await served.load(manifest(Version(0, 3), weights), weights)
        assert [folder.name for folder in (tmp_path / "server").iterdir()] == ["weights-0.3"]

    run(play)


def test_loading_waits_for_the_turns_that_are_being_sampled(
    server: Server, tiny_text: Path, tmp_path: Path
) -> None:
    async def play() -> None:
        served = client(server, tiny_text, tmp_path, interface="tokens")
        turns = [
            asyncio.create_task(served.generate(prompt(tiny_text, "Why?"), Sampling(1.0, 8)))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        await served.pause()
        assert all(turn.done() for turn in turns)
        late = asyncio.create_task(served.generate(prompt(tiny_text, "Why?"), Sampling(1.0, 8)))
        await asyncio.sleep(0.1)
        assert len(server.requests) == 3
        await served.resume()
        assert len((await late).token_ids) <= 8

    run(play)


def test_a_server_that_training_cannot_use_is_refused(
    server: Server, tiny_text: Path, tmp_path: Path
) -> None:
    weights = hf_state(load_model(ModelSettings(path=str(tiny_text))))
    described = manifest(Version(0, 1), weights)

    async def play() -> None:
        with pytest.raises(ConfigError, match="takes no weights"):
            await client(server, tiny_text, tmp_path, interface="tokens").load(described, weights)
        server.app.router.routes = [
            route for route in server.app.routes if route.path != "/v1/completions"
        ]  # type: ignore[attr-defined]
        server.app.post("/v1/completions")(
            lambda: {"choices": [{"text": "Hello.", "finish_reason": "stop"}]}
        )
        with pytest.raises(
            ConfigError, match=r"does not return token ids .*token_ids.* vLLM's server does"
        ):
            await client(server, tiny_text, tmp_path, interface="tokens", update=UPDATE).load(
                described, weights
            )

    run(play)


def test_a_prompt_goes_out_as_messages_and_images(
    tiny_vlm: Path, server: Server, tmp_path: Path
) -> None:
    renderer = Renderer(ModelSettings(path=str(tiny_vlm)), 10**6)
    first, second = (image(56, 56, seed).data for seed in (1, 2))
    assert first is not None
    assert second is not None
    asked = [
        Message("system", ("Answer briefly.",)),
        Message(
            "user",
            (
                ImageSource(data=first),
                ImageSource(data=second),
                "What does <|im_end|> mean?\n\nSay it.",
            ),
        ),
    ]
    rendered = renderer.prompt(asked)
    answer = renderer.encode("Nothing.")
    follows = renderer.observation(
        [Message("user", ("Look again: ", ImageSource(data=first)))], answer
    )
    whole = TokenPrompt(
        (*rendered.token_ids, *answer, *follows.token_ids), (*rendered.images, *follows.images)
    )

    async def play() -> None:
        await client(server, tiny_vlm, tmp_path).generate(whole, Sampling(0.5, 8))

    run(play)
    [(path, _, body)] = server.requests
    assert (path, body["model"], body["temperature"], body["max_tokens"]) == (
        "/v1/chat/completions",
        "served",
        0.5,
        8,
    )
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in (first, second)]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert body["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "Answer briefly."}]},
        {
            "role": "user",
            "content": [
                *pictures,
                {"type": "text", "text": "What does <|im_end|> mean?\n\nSay it."},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Nothing."}]},
        {"role": "user", "content": [{"type": "text", "text": "Look again: "}, pictures[0]]},
    ]


@pytest.mark.parametrize(
    ("reply", "text", "finish"),
    [
        (
            {"message": {"content": "It is 12."}, "finish_reason": "stop"},
            "It is 12.<|im_end|>",
            "end_token",
        ),
        ({"message": {"content": "It is 12."}, "finish_reason": "length"}, "It is 12.", "length"),
        (
            {"message": {"content": "a</answer> b</answer>"}, "finish_reason": "stop"},
            "a</answer>",
            "stop_string",
        ),
        ({"message": {"content": None}, "finish_reason": "stop"}, "<|im_end|>", "end_token"),
    ],
)
def test_an_answer_comes_back_in_our_tokens(
    reply: dict[str, Any], text: str, finish: str, server: Server, tiny_text: Path, tmp_path: Path
) -> None:
    server.reply = reply

    async def play() -> None:
        engine = client(server, tiny_text, tmp_path)
        sampling = Sampling(1.0, 40, stop=("</answer>",))
        found = await engine.generate(
            prompt(tiny_text, "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"), sampling
        )
        assert engine._tokenizer.decode(found.token_ids, skip_special_tokens=False) == text
        assert found.finish is FinishReason(finish)
        assert len(found.logprobs) == len(found.token_ids)
        assert all(map(math.isnan, found.logprobs))
        short = await engine.generate(prompt(tiny_text, "<|im_start|>user\nWhy?"), Sampling(1.0, 1))
        assert len(short.token_ids) == 1

    run(play)


@pytest.fixture
def second(tiny_text: Path) -> Iterator[Server]:
    with serving(tiny_text) as running:
        yield running


NOWHERE = "http://127.0.0.1:9/v1"
"""Refuses connections."""


def asked_for(model: Path, affinity: str) -> TokenPrompt:
    return dataclasses.replace(prompt(model, "Why?"), affinity=affinity)


def test_groups_are_spread_over_servers_and_each_stays_on_one(
    server: Server, second: Server, tiny_text: Path, tmp_path: Path
) -> None:
    async def play() -> None:
        both = client(
            server, tiny_text, tmp_path, base_url=[f"{server.url}/v1", f"{second.url}/v1"]
        )
        found = []
        for group in range(12):
            before = len(server.requests), len(second.requests)
            for _ in range(3):
                await both.generate(asked_for(tiny_text, str(group)), Sampling(1.0, 4))
            found.append((len(server.requests) - before[0], len(second.requests) - before[1]))
        assert set(found) == {(3, 0), (0, 3)}

    run(play)


def test_a_server_that_refuses_is_passed_over(
    server: Server, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_requests, "REQUEST_ATTEMPTS", 1)

    async def play() -> None:
        alive = client(server, tiny_text, tmp_path, base_url=[NOWHERE, f"{server.url}/v1"])
        for group in range(8):
            await alive.generate(asked_for(tiny_text, str(group)), Sampling(1.0, 4))
        assert len(server.requests) == 8
        server.faults = [503]
        with pytest.raises(
            WorkerLost, match="HTTP 503"
        ):  # it is there, and busy: the conversation does not leave it
            await alive.generate(asked_for(tiny_text, "0"), Sampling(1.0, 4))
        gone = client(server, tiny_text, tmp_path, base_url=[NOWHERE, "http://127.0.0.1:13/v1"])
        with pytest.raises(
            WorkerLost,
            match=r"the server failed 1 times, last: http://127\.0\.0\.1:\d+/v1/chat.*ConnectError",
        ):
            await gone.generate(asked_for(tiny_text, "0"), Sampling(1.0, 4))

    run(play)


def test_weights_go_to_every_server(
    server: Server, second: Server, tiny_text: Path, tmp_path: Path
) -> None:
    weights = {
        n: t.clone() for n, t in hf_state(load_model(ModelSettings(path=str(tiny_text)))).items()
    }

    async def play() -> None:
        addresses = [f"{one.url}/v1" for one in (server, second)]
        for one in (server, second):  # the engine behind each exists from its first answer on
            await client(one, tiny_text, tmp_path, interface="tokens").generate(
                prompt(tiny_text, "Why?"), Sampling(1.0, 1)
            )
        both = client(
            server, tiny_text, tmp_path, interface="tokens", update=UPDATE, base_url=addresses
        )
        await both.load(manifest(Version(0, 1), weights), weights)
        assert [
            [path for path, _, _ in one.requests].count("/load") for one in (server, second)
        ] == [1, 1]
        second.loads = False
        with pytest.raises(WeightSyncError, match=rf"version 0\.2: {second.url}/load answered"):
            await both.load(manifest(Version(0, 2), weights), weights)
        with pytest.raises(WorkerLost, match="the last load failed"):
            await both.generate(prompt(tiny_text, "Why?"), Sampling(1.0, 1))

    run(play)


def test_addresses_are_checked() -> None:
    for wrong in ([], "host:8000/v1", ["http://a/v1", "b:8000"]):
        with pytest.raises(ValidationError):
            OpenAiHttpEngineSettings.model_validate({"base_url": wrong, "model": "m"})
    settings = OpenAiHttpEngineSettings.model_validate(
        {"base_url": ["http://a/v1", "http://b/v1"], "model": "m"}
    )
    assert settings.own_weights == "m at http://a/v1, http://b/v1"


def test_failures_say_whose_they_are(
    server: Server, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")

    async def ask(faults: list[int], **changes: Any) -> Any:
        server.faults = faults
        one = client(server, tiny_text, tmp_path, interface="tokens", **changes)
        return await one.generate(prompt(tiny_text, "Why?"), Sampling(1.0, 2))

    async def play() -> None:
        assert (await ask([503])).token_ids, "a busy server is asked again"
        assert all(headers["authorization"] == "Bearer s3cret" for _, headers, _ in server.requests)
        with pytest.raises(
            WorkerLost, match=r"the server failed 2 times, last: http.*/v1/completions: HTTP 500"
        ):
            await ask([429, 500])
        with pytest.raises(DataFailure, match=r"HTTP 400: .*as the test wants it"):
            await ask([400])
        with pytest.raises(ConfigError, match=r"rollout\.engine: .*HTTP 401"):
            await ask([401])
        with pytest.raises(WorkerLost, match="ConnectError"):
            await ask([], base_url=NOWHERE)

    run(play)


def test_no_request_begins_in_a_pause_that_follows_another_at_once(
    server: Server, tiny_text: Path, tmp_path: Path
) -> None:
    async def play() -> None:
        served = client(server, tiny_text, tmp_path, interface="tokens")
        await served.pause()
        asked = asyncio.create_task(
            served.generate(prompt(tiny_text, "What is 3 + 9?"), Sampling(0.0, 4))
        )
        await asyncio.sleep(0.01)
        await served.resume()
        await served.pause()
        await asyncio.sleep(0.01)
        assert not served._running
        await served.resume()
        assert (await asked).token_ids

    run(play)
