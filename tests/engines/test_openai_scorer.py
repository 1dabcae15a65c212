"""A served reference's answers that are none: each is a failure of the server, or of the
configuration, never a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rayloop.actors.reference import ReferenceActor
from rayloop.chat.tokenizer import load_tokenizer
from rayloop.core.failures import ConfigError, WorkerLost
from rayloop.engines.generation import openai_requests, openai_scorer
from rayloop.engines.generation.openai_scorer import OpenAiScorer
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.engines.tiny_vlm import write_tiny_vlm
from tests.engines.training import trajectory

URL = "http://teacher:8000/v1"
Entries = list[dict[str, dict[str, Any]] | None]


class Teacher:
    """Answers as vLLM does, with log-probs of -0.5; ``change`` edits the entries of a prompt."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.models = ["teacher"]
        self.change: Callable[[Entries], Any] = lambda entries: entries
        self.statuses: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        if request.url.path == "/inference/v1/generate":
            return httpx.Response(404, json={"detail": "Not Found"})
        body = json.loads(request.content)
        assert body["model"] == "teacher"
        if request.url.path == "/tokenize":
            return httpx.Response(
                200,
                json={
                    "tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
                },
            )
        if self.statuses:
            return httpx.Response(self.statuses.pop(0), text="as the test wants it")
        entries: Entries = [
            None,
            *({str(token): {"logprob": -0.5}} for token in body["prompt"][1:]),
        ]
        return httpx.Response(
            200, json={"choices": [{"text": "", "prompt_logprobs": self.change(entries)}]}
        )


@pytest.fixture
def teacher(tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> Teacher:
    made = Teacher(tiny_text)
    transport = httpx.MockTransport(made)
    for module in (openai_scorer, openai_requests):
        monkeypatch.setattr(module, "client", lambda url: httpx.AsyncClient(transport=transport))
    monkeypatch.setattr(openai_requests, "REQUEST_ATTEMPTS", 2)
    return made


def score(folder: Path, *turns: tuple[int, tuple[int, int] | None, int]) -> list[Any]:
    return OpenAiScorer(ModelSettings(path=str(folder)), URL).logprobs(
        [trajectory(folder, 0, turns or [(4, None, 3)])]
    )


def test_one_number_for_each_sampled_token_and_a_busy_server_is_asked_again(
    teacher: Teacher, tiny_text: Path
) -> None:
    teacher.statuses = [503]
    [found] = score(tiny_text, (4, None, 3), (2, None, 5))
    assert found.dtype == np.float32
    assert found.tolist() == [-0.5] * 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda entries: entries[:-1], "6 entries for 7 tokens"),
        (lambda entries: None if len(entries) > 2 else entries, "NoneType"),
        (lambda entries: [*entries[:-1], {"1": {"logprob": -0.5}}], "KeyError"),
        (lambda entries: [*entries[:-1], None], "TypeError"),
        (lambda entries: [*entries[:-1], {t: {"logprob": None} for t in entries[-1]}], "TypeError"),
        (
            lambda entries: [*entries[:-1], {t: {"logprob": 0.5} for t in entries[-1]}],
            "0.5 is not a log-prob",
        ),
        (
            lambda entries: [*entries[:-1], {t: {"logprob": -9999.0} for t in entries[-1]}],
            "-9999.0 is not a log-prob",
        ),
    ],
)
def test_a_wrong_answer_is_a_lost_server(
    teacher: Teacher, tiny_text: Path, change: Any, why: str
) -> None:
    teacher.change = change
    with pytest.raises(
        WorkerLost, match=rf"^reference\.path: {URL} gave no log-prob for each of 7 tokens: .*{why}"
    ):
        score(tiny_text)


def test_a_reference_actor_asks_its_server(teacher: Teacher, tiny_text: Path) -> None:
    actor = ReferenceActor(ModelSettings(path=str(tiny_text)), FsdpSettings(), URL)
    assert (
        actor.scorer.logprobs([trajectory(tiny_text, 0, [(4, None, 3)])])[0].tolist() == [-0.5] * 3
    )


def test_a_server_that_goes_on_failing_is_lost(teacher: Teacher, tiny_text: Path) -> None:
    teacher.statuses = [500, 500]
    with pytest.raises(WorkerLost, match=r"the server failed 2 times, last: .*HTTP 500"):
        score(tiny_text)


def test_what_cannot_be_a_reference_is_refused(
    teacher: Teacher, tiny_text: Path, tiny_vlm: Path, tmp_path: Path
) -> None:
    teacher.models = ["teacher", "another"]
    with pytest.raises(ConfigError, match=r"^reference\.path: .*/models does not name one model"):
        score(tiny_text)
    teacher.models, teacher.change = ["teacher"], lambda entries: None
    with pytest.raises(
        ConfigError,
        match=r"returns no prompt_logprobs, as vLLM's server does\. Name another server",
    ):
        score(tiny_text)
    teacher.statuses, teacher.change = [404], lambda entries: entries
    with pytest.raises(ConfigError, match=r"^reference\.path: .*HTTP 404"):
        score(tiny_text)
    with pytest.raises(
        ConfigError,
        match=r"takes no images with token ids, and trajectory .* has images\. Start vLLM with"
        " --enable-scale-out, or name a folder",
    ):
        score(tiny_vlm, (4, (2, 2), 3))
    other = write_tiny_vlm(
        tmp_path / "other",
        ["Words that the other does not know."] * 9,
        vision=False,
        hidden=64,
        heads=2,
        layers=1,
    )
    teacher.tokenizer = load_tokenizer(other)
    with pytest.raises(
        ConfigError, match=r"has another tokenizer than model\.path .*of one text a token is \("
    ):
        score(tiny_text)
