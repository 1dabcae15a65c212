"""What an answer of the policy's endpoint has, whichever engine samples it: token ids, their
log-probs, the version of the weights.

On vLLM too (``make test-vllm``); the endpoint as a process beside a real run is in
``tests/serve/test_policy.py``.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from PIL import Image

from rayloop.core.types import Completion, Sampling, TokenPrompt, Version
from rayloop.engines.settings import ModelSettings
from rayloop.serve_apps.policy.app import web
from rayloop.serve_apps.policy.engines import Engines
from rayloop.serve_apps.policy.service import PolicyService
from rayloop.serve_apps.settings import PolicyEndpointSettings
from tests.contracts.test_engine import Hosted, Served, close

pytestmark = pytest.mark.timeout(300)
WEIGHTS = Version(2, 7)


class Direct:
    """In place of ``Engines``: one engine, asked as its actor asks it; keeps what it was asked and
    said.
    """

    why, serving, version = "", ("one",), WEIGHTS

    def __init__(self, engine: Any) -> None:
        self._hosted = Hosted(engine)
        self.asked: list[tuple[TokenPrompt, Sampling, list[Completion]]] = []

    async def sample(
        self, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        said = cast(list[Completion], await self._hosted.generate_each(prompt, seeds, sampling))
        self.asked.append((prompt, sampling, said))
        return said


def question() -> list[dict[str, Any]]:
    encoded = io.BytesIO()
    Image.new("RGB", (84, 56), (200, 40, 9)).save(encoded, "PNG")
    url = "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "See"},
                {"type": "image_url", "image_url": {"url": url}},
            ],
        }
    ]


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_an_answer_has_the_engines_tokens_logprobs_and_weights(kind: str, tiny_vlm: Path) -> None:
    served = Served(kind, tiny_vlm)
    direct = Direct(served.engine)
    settings = PolicyEndpointSettings(
        run="r", namespace="n", model=ModelSettings(path=str(tiny_vlm)), insecure=True, tokens=1024
    )
    body = {
        "model": "r",
        "messages": question(),
        "n": 2,
        "seed": 5,
        "logprobs": True,
        "return_token_ids": True,
        "max_tokens": 6,
    }

    async def ask() -> dict[str, Any]:
        await served.load(served.start, WEIGHTS)
        app = web(PolicyService(settings, cast(Engines, direct)), "")
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost"
        ) as http:
            answer = await http.post("/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return cast(dict[str, Any], answer.json())

    try:
        answer = served.run(ask())
    finally:
        served.close()
    ((prompt, sampling, completions),) = direct.asked
    assert answer["prompt_token_ids"] == list(prompt.token_ids)
    assert len(prompt.images) == len(answer["rayloop"]["images"]) == 1
    assert [choice["weight_version"] for choice in answer["choices"]] == ["2.7", "2.7"]
    for choice, completion in zip(answer["choices"], completions, strict=True):
        assert choice["token_ids"] == list(completion.token_ids)
        assert [token["logprob"] for token in choice["logprobs"]["content"]] == list(
            completion.logprobs
        )
        close(tiny_vlm, prompt, completion, sampling)
