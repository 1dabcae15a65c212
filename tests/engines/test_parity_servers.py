"""``rayloop parity`` with servers: prompt log-probs of text and images, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from rayloop.chat.openai.routes import add_routes
from rayloop.chat.rendering import Renderer
from rayloop.chat.tokenizer import load_tokenizer
from rayloop.cli import main
from rayloop.config.model import ModelSettings
from rayloop.core.types import ImageSource, Message, PromptImage
from rayloop.engines.generation import openai_requests, openai_scorer
from rayloop.engines.models import load_model, load_vision
from rayloop.parity.comparison import NO_IMAGES
from tests.engines.test_parity import ALL_PLAYS, BEHIND, SHORT, parity
from tests.support.openai_server import serving

pytestmark = pytest.mark.timeout(900)

URL = "http://served:8000/v1"


class Served:
    """A server with vLLM's prompt log-probs, all of them ``shift`` too high; None: it has none."""

    def __init__(self, folder: Path) -> None:
        self.settings = ModelSettings(path=str(folder))
        self.model = load_model(self.settings)
        self.vision = load_vision(self.settings, self.model.config)
        self.renderer = Renderer(self.settings)
        self.tokenizer = load_tokenizer(folder)
        self.shift: float | None = 0.0
        self.takes_images = True
        self.swaps_images = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.url.path == "/inference/v1/generate" and not self.takes_images:
            return httpx.Response(404, json={"detail": "Not Found"})
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
            return httpx.Response(200, json={"tokens": ids})
        if request.url.path == "/inference/v1/generate":
            if "token_ids" not in body:
                return httpx.Response(400, json={"error": "token_ids: Field required"})
            return httpx.Response(200, json=self._generated(body))
        entries = self._entries(body["prompt"], [])
        return httpx.Response(200, json={"choices": [{"text": "", "prompt_logprobs": entries}]})

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        urls = [part["url"] for part in body["content_parts"]]
        data = [base64.b64decode(url.partition(",")[2]) for url in urls]
        sources = tuple(ImageSource(data=each) for each in data)
        images = list(self.renderer.prompt([Message("user", sources)]).images)
        remaining = iter(images)
        ids: list[int] = []
        for token in body["token_ids"]:
            number = next(remaining).ref.tokens if token == self._image_token else 1
            ids += [token] * number
        if self.swaps_images:
            images[:2] = images[:2][::-1]
        return {"prompt_token_ids": ids, "prompt_logprobs": self._entries(ids, images)}

    @property
    def _image_token(self) -> int:
        token: int = self.model.config.image_token_id
        return token

    def _entries(self, ids: list[int], images: list[PromptImage]) -> Any:
        if self.shift is None:
            return None
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if images:
            assert self.vision is not None
            pixels = [self.vision.pixels(image.ref, image.data) for image in images]
            inputs["pixel_values"] = torch.cat(pixels)
            inputs["image_grid_thw"] = torch.tensor([image.ref.grid for image in images])
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self._image_token).int()
        with torch.no_grad():
            logprobs = self.model(**inputs).logits[0].log_softmax(-1)
        entries: list[Any] = [None]
        for place, token in enumerate(ids[1:]):
            value = float(logprobs[place, token]) - self.shift
            entries.append({str(token): {"logprob": value}})
        return entries


def connect(handler: httpx.MockTransport | httpx.ASGITransport, patch: pytest.MonkeyPatch) -> None:
    """Have every request go to this server."""
    for module in (openai_scorer, openai_requests):
        patch.setattr(module, "client", lambda url: httpx.AsyncClient(transport=handler))


@pytest.fixture
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Served:
    server = Served(request.getfixturevalue(request.param))
    connect(httpx.MockTransport(server), monkeypatch)
    return server


@pytest.mark.parametrize("served", ["tiny_text"], indirect=True)
def test_a_server_is_compared_by_its_prompt_log_probs(
    served: Served, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_text), *SHORT, "--against", URL]
    code, found = parity(capsys, *words)
    assert code == 0, found["agreement"]["sentence"]
    assert found["origin"]["engine"] == URL
    assert found["total"]["gap"]["largest"] < BEHIND * found["limit"]
    assert found["notes"] == []
    served.shift = 0.01
    code, found = parity(capsys, *words)
    assert code == 1
    assert found["total"]["gap"]["mean"] == pytest.approx(0.01, abs=1e-4)
    verdict = found["agreement"]
    assert (verdict["begins"], verdict["number"], verdict["plays"]) == ("turn", 1, ALL_PLAYS)
    served.shift = None
    assert main(["parity", *words]) == 2
    assert f"--against: {URL} returns no prompt_logprobs" in capsys.readouterr().err


@pytest.mark.parametrize("served", ["tiny_vlm"], indirect=True)
def test_a_server_is_compared_with_images(
    served: Served, tiny_vlm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_vlm), *SHORT, "--against", URL]
    code, found = parity(capsys, *words)
    assert code == 0, found["agreement"]["sentence"]
    assert found["total"]["gap"]["largest"] < BEHIND * found["limit"]
    assert {row["images"] for row in found["rows"]} == {0, 1, 2, 3, 4}
    assert found["notes"] == []
    served.swaps_images = True
    code, found = parity(capsys, *words)
    assert code == 1
    verdict = found["agreement"]
    assert (verdict["begins"], verdict["number"], verdict["plays"]) == ("image", 2, ALL_PLAYS)


@pytest.mark.parametrize("served", ["tiny_vlm"], indirect=True)
def test_a_server_without_a_path_for_images_is_compared_with_text(
    served: Served, tiny_vlm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.takes_images = False
    code, found = parity(capsys, str(tiny_vlm), *SHORT, "--against", URL)
    assert code == 0, found["agreement"]["sentence"]
    assert {row["images"] for row in found["rows"]} == {0}
    assert found["notes"] == [NO_IMAGES]


@pytest.mark.parametrize("served", ["tiny_vlm"], indirect=True)
def test_a_server_with_another_size_of_images_is_refused(
    served: Served, tiny_vlm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller = served.settings.model_copy(update={"max_pixels": 56 * 56})
    served.renderer = Renderer(smaller)
    served.vision = load_vision(smaller, served.model.config)
    assert main(["parity", str(tiny_vlm), *SHORT, "--against", URL]) == 2
    error = capsys.readouterr().err
    assert f"--against: {URL} expands images to other tokens than" in error
    assert len(error.splitlines()) == 1


def test_the_policy_endpoint_has_no_prompt_log_probs(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = SimpleNamespace(model=lambda: {"id": "run", "object": "model"})
    endpoint = FastAPI()
    add_routes(endpoint, lambda request: policy)  # type: ignore[arg-type,return-value]
    connect(httpx.ASGITransport(endpoint), monkeypatch)
    assert main(["parity", str(tiny_vlm), *SHORT, "--against", URL]) == 2
    error = capsys.readouterr().err
    assert f"--against: {URL} returns no prompt_logprobs, as vLLM's server does" in error
    assert len(error.splitlines()) == 1


def test_a_served_engine_plays_text(tiny_vlm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tiny_vlm) as server:
        server.app.get("/v1/models")(lambda: {"data": [{"id": "served"}]})
        code, found = parity(capsys, str(tiny_vlm), *SHORT, "--engine", f"{server.url}/v1")
    assert code == 0, found["agreement"]["sentence"]
    assert {row["images"] for row in found["rows"]} == {0}
    assert found["notes"] == [NO_IMAGES]
