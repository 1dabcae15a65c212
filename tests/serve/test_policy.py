"""The policy's endpoint during a real run: the official client, tokens of training, bad requests, and engines that die."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from PIL import Image

from tests.support.models import picture_model as picture_model
from tests.support.policies import Endpoint, endpoint
from tests.support.runs import Run, run, settings

pytestmark = [pytest.mark.judge, pytest.mark.timeout(240)]


def picture(red: int) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (84, 56), (red, 40, 200)).save(encoded, "PNG")
    return encoded.getvalue()


def shown(red: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture(red)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def live(picture_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that trains for as long as the tests ask, and changes next to nothing, so that its weights stay those of the folder."""
    config = settings(tmp_path_factory.mktemp("live"), picture_model, steps=100_000, policy__optimizer__lr=1e-12)
    config["reward"]["source"]["with"] = {"seconds": 0.3}
    with run(config) as made:
        made.until(lambda: made.metrics, "the first step")
        yield made


@pytest.fixture(scope="module")
def served(live: Run) -> Iterator[Endpoint]:
    with endpoint(live, "limits.bytes=200000", "limits.choices=4", "limits.seconds=60") as made:
        made.ready()
        yield made


@pytest.fixture
def client(served: Endpoint) -> OpenAI:
    return OpenAI(base_url=served.url, api_key=served.key, max_retries=0, http_client=httpx.Client(trust_env=False))


ASK: dict[str, Any] = {
    "model": "run", "logprobs": True, "extra_body": {"return_token_ids": True}, "max_tokens": 6, "seed": 3,
}  # fmt: skip


def test_the_official_client_drives_the_policy_while_it_is_trained(client: OpenAI, live: Run) -> None:
    (model,) = client.models.list().data
    assert model.id == "run"
    question = [{"role": "user", "content": [{"type": "text", "text": "Sort: 3 1 2"}, shown(9)]}]
    first = client.chat.completions.create(messages=question, n=3, **ASK)
    again = client.chat.completions.create(messages=question, n=3, **ASK)
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices], "a seed repeats"
    assert len({tuple(c.token_ids) for c in first.choices}) > 1
    for choice in first.choices:
        assert len(choice.logprobs.content) == len(choice.token_ids) <= 6
        assert all(token.logprob <= 0 for token in choice.logprobs.content)
    steps = len(live.metrics)
    live.until(lambda: len(live.metrics) > steps + 1, "the run goes on")
    later = client.chat.completions.create(messages=question, **ASK)
    assert later.model_extra["rayloop"]["step"] > first.model_extra["rayloop"]["step"], "it is the current policy"
