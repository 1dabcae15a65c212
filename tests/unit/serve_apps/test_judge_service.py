"""The judge's service without Ray: key, sizes, limits, deadlines, readiness, the model's server,
settings and panels.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
import yaml
from fastapi import Request, Response
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from rayloop.cli import parsed
from rayloop.config.settings import load
from rayloop.core.failures import ConfigError, DeadlineExceeded, InfrastructureFailure
from rayloop.core.files import new_secret
from rayloop.judge import transport as judge_metrics
from rayloop.judge.api import JudgeItem, JudgeUnscored, JudgeVerdict
from rayloop.judge.grader import Grader
from rayloop.judge.rubric import FOLDER, load_rubrics
from rayloop.serve_apps.judge.app import app, built, web
from rayloop.serve_apps.judge.openai_model import OpenAIModel, correct_probability
from rayloop.serve_apps.judge.service import JudgeMetrics, JudgeService
from rayloop.serve_apps.settings import CONFIGS, JudgeSettings, OpenAIBackendSettings, ServeFile
from tests.support.judges import ModelStub

RUBRICS = load_rubrics()
KEY = {"Authorization": "Bearer k"}
ITEM = {"question": "q", "reference": "a red rose", "answer": "a crimson rose"}
CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}]}


class Slow(Grader):
    """Rules that take their time, and may be broken."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        super().__init__(RUBRICS)
        self.seconds, self.error = seconds, error

    async def judge(self, items: Sequence[JudgeItem]) -> Sequence[JudgeVerdict | JudgeUnscored]:
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error
        return await super().judge(items)


@asynccontextmanager
async def asked(
    backend: Grader, key: str = "k", chat: Any = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service in this process, whose canary was asked once."""
    service = JudgeService(JudgeSettings.model_validate(settings), backend, chat, "r")
    transport = httpx.ASGITransport(web(service, key), raise_app_exceptions=False)
    async with (
        service.running(),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client,
    ):
        await asyncio.sleep(0.05)
        yield client


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_only_healthz_needs_no_key() -> None:
    async def test() -> None:
        headers = (
            ({}, 401),
            ({"Authorization": "Basic k"}, 401),
            ({"Authorization": "Bearer kk"}, 403),
            (KEY, 200),
        )
        async with asked(Grader(RUBRICS)) as http:
            assert (await http.get("/healthz")).status_code == 200
            for header, status in headers:
                for path in ("/readyz", "/version", "/metrics"):
                    assert (await http.get(path, headers=header)).status_code == status
        async with asked(Grader(RUBRICS), key="") as http:
            assert (await http.get("/readyz")).status_code == 200

    run(test)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"question": "q", "reference": "\\ud800", "answer": NaN}', 422),
        (
            b"[" * 2000,
            400 if sys.version_info < (3, 12) else 422,
        ),  # too deep for Python 3.11; no end of it is found later
        (b'\xff\xfe{"question"', 400),
        (b"", 422),
        (b'{"items": []}', 422),
        (b'{"question": "q", "reference": "r", "answer": "' + b"a" * 5000 + b'"}', 413),
    ],
)
def test_no_body_makes_it_fail(content: bytes, status: int) -> None:
    async def test() -> None:
        async with asked(Grader(RUBRICS), limits={"bytes": 4096}) as http:
            answer = await http.post(
                "/v1/judge", headers=KEY | {"content-type": "application/json"}, content=content
            )
            assert (answer.status_code, list(answer.json())) == (status, ["error"])

    run(test)


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"question": '
        await asyncio.sleep(30)

    async def test() -> None:
        async with asked(Grader(RUBRICS), limits={"body_seconds": 0.1}) as http:
            answer = await http.post("/v1/judge", headers=KEY, content=slowly())
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "too_slow")

    run(test)


def test_without_a_key_no_body_is_waited_for() -> None:
    """Else a few clients without a key, which send half of a body, would hold all places of a
    replica.
    """
    received = []

    async def never() -> dict[str, Any]:
        received.append(1)
        await asyncio.sleep(30)
        return {}

    async def answer(service: JudgeService, path: str) -> int:
        statuses = []

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
        }
        async with asyncio.timeout(5):
            await web(service, "k")(
                {**scope, "http_version": "1.1", "root_path": "", "scheme": "http"}, never, send
            )
        return int(statuses[0])

    async def test() -> None:
        service = JudgeService(JudgeSettings(), Grader(RUBRICS), None, "r")
        assert [
            await answer(service, path) for path in ("/healthz", "/openapi.json", "/version")
        ] == [200, 200, 401]
        assert not received

    run(test)


def test_what_nobody_foresaw_is_a_503_in_the_same_form() -> None:
    async def test() -> None:
        async with asked(Slow(error=KeyError("schema"))) as http:
            answer = await http.post("/v1/judge", headers=KEY, json=ITEM)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            wanted = {
                "message": "the judge failed: KeyError",
                "type": "server_error",
                "code": "failed",
            }
            assert answer.json()["error"] == wanted

    run(test)


def test_images_are_files_below_the_roots_or_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        outside, root = tmp_path / "a.png", tmp_path / "root"
        root.mkdir()
        (root / "out").symlink_to(tmp_path)
        for path, size in (
            (outside, 9),
            (root / "a.png", 1024),
            (root / "large.png", 1025),
            (root / "secret", 9),
        ):
            path.write_bytes(b"x" * size)
        async with asked(Grader(RUBRICS), image_roots=[str(root)], limits={"image": 1024}) as http:
            for image, status in (
                (root / "a.png", 200),
                (root / ".." / "a.png", 422),
                (root / "out" / "a.png", 422),
                ("a.png", 422),
                ("https://x/a.png", 422),
                (f"file://{root}/a.png", 422),
                (root / "missing.png", 422),
                (root / "large.png", 422),
                (root / "secret", 422),
                (f"{root}/a\0.png", 422),
                (f"{root}/{'a' * 300}.png", 422),
            ):
                answer = await http.post(
                    "/v1/judge", headers=KEY, json=ITEM | {"images": [str(image)]}
                )
                assert answer.status_code == status, image

    run(test)


def test_what_is_read_is_the_file_that_was_looked_at(tmp_path: Path) -> None:
    """A link that is turned elsewhere later changes nothing; and the images of a request are
    limited together.
    """
    (tmp_path / "a.png").write_bytes(b"x" * 1000)
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    seen: list[str] = []

    class Recording(Grader):
        async def judge(self, items: Sequence[JudgeItem]) -> Sequence[JudgeVerdict | JudgeUnscored]:
            seen.extend(image for item in items for image in item.images)
            return await super().judge(items)

    async def test() -> None:
        async with asked(
            Recording(RUBRICS), image_roots=[str(tmp_path)], limits={"images": 2048}
        ) as http:
            for count, status in ((2, 200), (3, 422)):
                images = [str(tmp_path / "link.png")] * count
                assert (
                    await http.post("/v1/judge", headers=KEY, json=ITEM | {"images": images})
                ).status_code == status

    run(test)
    assert set(seen) == {str(tmp_path / "a.png")}


def test_a_model_server_without_a_free_slot_is_a_timeout() -> None:
    async def test() -> None:
        made = OpenAIBackendSettings(
            url="http://model/v1", model="stub", concurrency=1, timeout=0.1
        )

        async def hangs(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(5)

        model = OpenAIModel(made, httpx.ASGITransport(hangs))
        first = asyncio.create_task(model.complete(CHAT))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match=r"no free slot within 0\.1 s"):
            await model.complete(CHAT)
        first.cancel()

    run(test)


def test_an_unknown_rubric_is_refused_and_those_there_are_named() -> None:
    async def test() -> None:
        async with asked(Grader(RUBRICS)) as http:
            answer = await http.post("/v1/judge", headers=KEY, json=ITEM | {"rubric": "missing"})
            assert answer.status_code == 422
            assert (
                "missing: no such rubric; there are equivalence, graded"
                in answer.json()["error"]["message"]
            )

    run(test)


def test_the_vllm_backend_reads_text_only(tmp_path: Path) -> None:
    rubric = (FOLDER / "equivalence.yaml").read_text(encoding="utf-8")
    (tmp_path / "equivalence.yaml").write_text(f"{rubric}\nsees_images: true\n", encoding="utf-8")
    settings = JudgeSettings.model_validate(
        {"backend": {"kind": "vllm", "model": "m"}, "rubrics": str(tmp_path)}
    )
    with pytest.raises(
        ConfigError, match="equivalence shows images, and the backend vllm reads text only"
    ):
        built(settings)


def test_more_than_it_holds_is_a_503_that_says_when_to_come_back() -> None:
    async def test() -> None:
        async with asked(Slow(0.5), limits={"held": 4}) as http:
            four, three = ({"items": [ITEM] * count} for count in (4, 3))
            first = asyncio.create_task(http.post("/v1/judge", headers=KEY, json=four))
            await asyncio.sleep(0.1)
            second = await http.post("/v1/judge", headers=KEY, json=three)
            assert (second.status_code, second.headers["retry-after"]) == (503, "1")
            ready = await http.get("/readyz", headers=KEY)
            assert (ready.status_code, "queue" in ready.json()["failing"]) == (503, True)
            assert (await first).status_code == 200
            assert (await http.post("/v1/judge", headers=KEY, json=three)).status_code == 200
            metrics = (await http.get("/metrics", headers=KEY)).text
            assert (
                'judge_requests_total{outcome="Overloaded",replica="r",route="judge"} 1.0'
                in metrics
            )

    run(test)


@pytest.mark.parametrize(
    ("backend", "code", "failing"),
    [
        (Slow(5.0), "timeout", {"model", "canary"}),
        (
            Slow(error=InfrastructureFailure("the engine is gone")),
            "unavailable",
            {"model", "canary"},
        ),
        (Slow(error=DeadlineExceeded("too slow")), "timeout", {"canary"}),
    ],
)
def test_a_backend_that_fails_is_a_503_and_not_ready(
    backend: Slow, code: str, failing: set[str]
) -> None:
    async def test() -> None:
        async with asked(backend, limits={"seconds": 0.2}) as http:
            answer = await http.post("/v1/judge", headers=KEY, json=ITEM)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
            ready = await http.get("/readyz", headers=KEY)
            assert (ready.status_code, set(ready.json()["failing"])) == (503, failing)
            assert (await http.get("/healthz")).status_code == 200

    run(test)


def test_a_wrong_canary_is_not_ready() -> None:
    class Generous(Grader):
        async def judge(self, items: Sequence[JudgeItem]) -> Sequence[JudgeVerdict | JudgeUnscored]:
            return await super().judge(
                [item.model_copy(update={"answer": item.reference}) for item in items]
            )

    async def test() -> None:
        async with asked(Generous(RUBRICS)) as http:
            assert (
                "was judged correct"
                in (await http.get("/readyz", headers=KEY)).json()["failing"]["canary"]
            )
        async with asked(Generous(RUBRICS), canary={"right": False}) as http:
            assert (await http.get("/readyz", headers=KEY)).status_code == 200

    run(test)


@asynccontextmanager
async def with_model(stub: ModelStub, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A service whose model's server is the stub's application, in this process."""
    model = OpenAIModel(
        OpenAIBackendSettings(url="http://model/v1", model="stub"), httpx.ASGITransport(stub.app)
    )
    async with asked(Grader(RUBRICS, model, "openai"), chat=model, **settings) as http:
        while "not judged yet" in (await http.get("/readyz", headers=KEY)).text:
            await asyncio.sleep(0.01)
        stub.bodies.clear()
        yield http


def test_the_model_is_asked_what_rules_cannot_decide() -> None:
    async def test() -> None:
        async with with_model(stub := ModelStub()) as http:
            both = await http.post(
                "/v1/judge", headers=KEY, json={"items": [ITEM, ITEM | {"answer": "A red rose."}]}
            )
            first, second = both.json()["results"]
            assert (first["verdict"], first["decided_by"], first["backend"]) == (
                "incorrect",
                "model",
                "openai",
            )
            assert (second["verdict"], second["decided_by"]) == ("correct", "rules")
            (body,) = stub.bodies
            assert body["response_format"]["json_schema"]["strict"] is True

    run(test)


@pytest.mark.parametrize(
    ("status", "kind", "chat"),
    [
        (500, "unavailable", 503),
        (429, "unavailable", 429),
        (401, "unavailable", 503),
        (400, "unavailable", 400),
    ],
)
def test_a_model_server_that_fails_is_unscored(status: int, kind: str, chat: int) -> None:
    async def test() -> None:
        async with with_model(stub := ModelStub()) as http:
            stub.status = status
            (result,) = (await http.post("/v1/judge", headers=KEY, json=ITEM)).json()["results"]
            assert (result["outcome"], result["kind"]) == ("unscored", kind)
            said = await http.post("/v1/chat/completions", headers=KEY, json=CHAT)
            assert said.status_code == chat
            assert said.headers.get("retry-after") == {503: "1", 429: "7"}.get(chat)

    run(test)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (CHAT | {"max_tokens": 10**6}, 200),
        ({"messages": []}, 422),
        (CHAT | {"stream": True}, 422),
        (CHAT | {"guided_regex": ".*"}, 422),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
                        ],
                    }
                ]
            },
            422,
        ),
    ],
)
def test_what_of_a_chat_is_passed_on(body: dict[str, Any], status: int) -> None:
    async def test() -> None:
        async with with_model(stub := ModelStub(), limits={"chat_tokens": 100}) as http:
            assert (
                await http.post("/v1/chat/completions", headers=KEY, json=body)
            ).status_code == status
            passed = [(one["max_tokens"], one["model"]) for one in stub.bodies]
            assert passed == ([(100, "stub")] if status == 200 else [])

    run(test)


TOO_LONG = (
    '{"error": {"code": "context_length_exceeded", "message": "..."}}',
    (
        '{"message": "This model\'s maximum context length is 8192 tokens. However, you requested'
        ' 9000 tokens"}'
    ),
    '{"error": {"message": "Input is too long for requested model."}}',
)
SET_UP = (
    '{"error": {"message": "At most 0 image(s) may be provided in one prompt."}}',
    (
        '{"error": {"code": "content_filter", "message": "The response was filtered due to the'
        ' prompt triggering a policy"}}'
    ),
    '{"error": {"message": "logprobs is not supported"}}',
)


@pytest.mark.parametrize(
    ("body", "kind"),
    [*((body, "invalid") for body in TOO_LONG), *((body, "unavailable") for body in SET_UP)],
)
def test_a_refusal_is_the_answers_doing_only_when_it_is_too_long(body: str, kind: str) -> None:
    async def test() -> None:
        async with with_model(stub := Odd(body.encode())) as http:
            stub.status = 400
            (result,) = (await http.post("/v1/judge", headers=KEY, json=ITEM)).json()["results"]
            assert (result["outcome"], result["kind"]) == ("unscored", kind)

    run(test)


def test_a_reply_that_was_cut_off_is_the_judges_failure() -> None:
    choice = {"message": {"content": '{"reason": "描描描'}, "finish_reason": "length"}

    async def test() -> None:
        async with with_model(Odd(json.dumps({"choices": [choice]}).encode())) as http:
            (result,) = (await http.post("/v1/judge", headers=KEY, json=ITEM)).json()["results"]
            assert (result["kind"], "max_tokens 512" in result["reason"]) == ("unavailable", True)

    run(test)


def test_a_rubric_that_sees_has_a_canary_with_an_image() -> None:
    """A model's server that refuses images makes the judge not ready, however right it is about
    texts.
    """

    class Blind(ModelStub):
        def chat(self, request: Request, body: dict[str, Any]) -> Response:
            if isinstance(body["messages"][-1]["content"], list):
                return Response('{"error": {"message": "At most 0 image(s) may be provided"}}', 400)
            return super().chat(request, body)

    async def test() -> None:
        seeing = {"equivalence": RUBRICS["equivalence"].model_copy(update={"sees_images": True})}
        model = OpenAIModel(
            OpenAIBackendSettings(url="http://model/v1", model="stub"),
            httpx.ASGITransport(Blind().app),
        )
        service = JudgeService(JudgeSettings(), Grader(seeing, model, "openai"), model, "r")
        async with service.running():
            while "not judged yet" in service.failing().get("canary", ""):
                await asyncio.sleep(0.01)
            assert "At most 0 image" in service.failing()["canary"]

    run(test)


def test_what_a_models_server_says_it_is_goes_into_the_fingerprint() -> None:
    """vLLM's ``created`` is the time of the request, and must not."""
    cards: list[dict[str, Any]] = [
        {"id": "stub", "root": "Qwen/Qwen2.5-72B-Instruct", "created": 1},
        {"id": "else", "root": "x"},
    ]
    stub = ModelStub()

    @stub.app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": cards}

    async def fingerprint(url: str = "http://model/v1", **settings: Any) -> str:
        made = OpenAIBackendSettings(url=url, model="stub", **settings)
        backend = Grader(RUBRICS, OpenAIModel(made, httpx.ASGITransport(stub.app)), "openai")
        await backend.refresh()
        return backend.fingerprint

    async def test() -> None:
        first = await fingerprint()
        cards[0]["created"] = 2
        assert await fingerprint() == first
        assert await fingerprint(url="http://other/v1") != first
        assert await fingerprint(logprobs=False) != first
        cards[0]["root"] = "Qwen/Qwen2.5-7B-Instruct"
        assert await fingerprint() != first

    run(test)


class Odd(ModelStub):
    """A model's server whose every answer is ``content``."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.content = content

    def chat(self, request: Request, body: dict[str, Any]) -> Response:
        return Response(self.content, self.status, media_type="application/json")


def _reply(logprob: float) -> bytes:
    top = [{"token": "correct", "logprob": logprob}]
    tokens = [
        {"token": '{"reason": "a", "verdict": "', "top_logprobs": []},
        {"token": "correct", "top_logprobs": top},
    ]
    message = {"content": '{"reason": "a", "verdict": "correct"}'}
    return json.dumps({"choices": [{"message": message, "logprobs": {"content": tokens}}]}).encode()


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        (b"[" * 100_000, "unscored"),
        (b"null", "unscored"),
        (_reply(1e308), "scored"),
        (_reply(-1.0), "scored"),
    ],
)
def test_no_answer_of_the_models_server_makes_it_fail(content: bytes, outcome: str) -> None:
    async def test() -> None:
        async with with_model(Odd(content)) as http:
            answer = await http.post("/v1/judge", headers=KEY, json=ITEM)
            assert answer.status_code == 200
            (result,) = answer.json()["results"]
            assert (result["outcome"], result.get("kind", "unavailable")) == (
                outcome,
                "unavailable",
            )
            assert (
                await http.post("/v1/chat/completions", headers=KEY, json=CHAT)
            ).status_code in (200, 503)

    run(test)


def test_rules_have_nothing_to_chat_with() -> None:
    async def test() -> None:
        async with asked(Grader(RUBRICS)) as http:
            said = await http.post("/v1/chat/completions", headers=KEY, json=CHAT)
            assert (said.status_code, said.json()["error"]["code"]) == (404, "no_model")

    run(test)


@pytest.mark.parametrize(
    "words",
    [
        ('{"', "reason", '":"', 'x","', "verdict", '":"', "TOP", '"}'),
        ('{"reason":"x","verdict":', ' "TOP', '"}'),
    ],
)
def test_the_probability_is_that_of_the_verdicts_first_token(words: Sequence[str]) -> None:
    def token(text: str) -> dict[str, Any]:
        chances = (("correct", 0.6), ("in", 0.2), ("inc", 0.1), ("maybe", 0.1))
        top = [{"token": text.replace("TOP", word), "logprob": math.log(p)} for word, p in chances]
        return {
            "token": text.replace("TOP", "correct"),
            "top_logprobs": top if "TOP" in text else [],
        }

    assert correct_probability([token(word) for word in words]) == pytest.approx(0.6 / 0.9)
    assert correct_probability([token("no verdict")]) is None


def test_the_shipped_files_are_ray_serves_and_ours() -> None:
    for path in sorted(CONFIGS.glob("*.yaml")):
        load(path, [], ServeFile)
        (application,) = ServeDeploySchema.model_validate(
            yaml.safe_load(path.read_text(encoding="utf-8"))
        ).applications
        deployment = app(application.args | {"key_file": None, "insecure": True})._bound_deployment
        assert deployment.name == "Judge"
        assert 0 < deployment.max_ongoing_requests <= 256
        assert 0 < deployment.max_queued_requests <= 512
    rollouts = load(CONFIGS / "judge_qwen2_5_72b.yaml", [], ServeFile).applications[0].args
    assert (rollouts.backend.kind, rollouts.key_file) == (
        "vllm",
        str(Path("runs/judge.key").absolute()),
    )
    assert rollouts.replicas.resources == {"judge": 1}
    with pytest.raises(ValidationError, match="Extra inputs"):
        app({"backend": {"kind": "rule", "model": "x"}})
    with pytest.raises(ValidationError, match="min 3 is more than max 2"):
        app({"replicas": {"min": 3, "max": 2}})


def test_an_application_has_a_key_or_says_that_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve run` and `serve deploy` come here, past `judge serve`; replicas and clients run in
    other folders.
    """
    with pytest.raises(ConfigError, match=r"Name a file, or set insecure: true"):
        app({})
    app({"insecure": True})
    monkeypatch.chdir(tmp_path)
    (settings,) = app(
        {"key_file": "k", "rubrics": "r", "image_roots": ["i"], "cache": {"path": "c"}}
    )._bound_deployment.init_args
    found = (settings.key_file, settings.rubrics, *settings.image_roots, settings.cache.path)
    assert found == tuple(str(tmp_path / name) for name in "kric")
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600


def test_a_deployment_asks_for_its_resources_and_says_when_to_come_back() -> None:
    deployment = app({"insecure": True, "replicas": {"resources": {"judge": 1}}})._bound_deployment
    assert deployment.ray_actor_options["resources"] == {"judge": 1}
    assert deployment.backpressure_config.retry_after_s == 1


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key"
    new_secret(path, "the key")
    key = path.read_text(encoding="utf-8")
    new_secret(path, "the key")
    assert path.read_text(encoding="utf-8") == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(key.strip()) >= 32


def test_an_unguarded_judge_stays_on_loopback(tmp_path: Path) -> None:
    config = tmp_path / "open.yaml"
    config.write_text("http_options: {host: 0.0.0.0}\n", encoding="utf-8")
    arguments = parsed(["judge", "serve", str(config), "--insecure"])
    with pytest.raises(ConfigError, match="without a key only loopback is served"):
        arguments.run(arguments)


def test_a_value_is_changed_without_naming_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parsed(
        ["judge", "serve", "http_options.port=8001", "http_options.host=0.0.0.0", "--insecure"]
    )
    with pytest.raises(ConfigError, match=r"http_options\.host 0\.0\.0\.0: without a key"):
        arguments.run(arguments)


def test_every_panel_draws_metrics_that_exist() -> None:
    known = {metric.name for metric in JudgeMetrics("r", 1).registry.collect()}
    known |= {metric.name for metric in prometheus_client.REGISTRY.collect()}
    assert judge_metrics.REQUESTS
    panels = json.loads(
        (Path(__file__).parents[3] / "deploy" / "grafana" / "judge.json").read_text(
            encoding="utf-8"
        )
    )["panels"]
    for panel in panels:
        for target in panel["targets"]:
            names = {
                re.sub("_(total|bucket)$", "", name)
                for name in re.findall(r"judge_\w+", target["expr"])
            }
            assert names, panel["title"]
            assert names <= known, panel["title"]
