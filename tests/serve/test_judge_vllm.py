"""The judge with a vLLM engine of its own, on CPU with a tiny model: its verdicts are noise, the
path and its failures are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest

from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.judge.api import JudgeItem, JudgeVerdict
from rayloop.judge.client import JudgeClient
from rayloop.judge.prompt import messages
from rayloop.judge.rubric import load_rubrics
from tests.support.judges import Served, served
from tests.support.runs import eventually
from tests.support.vllm_processes import engine_cores

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(700),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs the environment with vLLM (make test-vllm)"
    ),
]


def item(number: int) -> JudgeItem:
    return JudgeItem(
        question="What is shown?",
        reference=f"A big dog {number}",
        answer=f"a large dog {number}",
        fresh=True,
    )


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    texts = [
        message["content"]
        for rubric in load_rubrics().values()
        for message in messages(rubric, item(0))
    ]
    model = write_tiny_vlm(
        tmp_path_factory.mktemp("model"), texts * 20, vision=False, vocabulary=2048
    )
    engine = {
        "dtype": "float32",
        "max_sequences": 8,
        "extra": {"enforce_eager": True, "kv_cache_memory_bytes": 2**28, "max_model_len": 8192},
    }
    backend = {"kind": "vllm", "model": str(model), "gpus": 0, "engine": engine}
    args = {
        "backend": backend,
        "canary": {"right": False, "within": 120.0, "every": 600.0},
        "replicas": {"cpus": 1},
    }
    with served(tmp_path_factory.mktemp("judge"), args) as made:
        made.ready(1)
        yield made


def test_verdicts_follow_the_schema_and_have_a_probability(judge: Served) -> None:
    with judge.http() as http:
        body = {"items": [item(n).model_dump(mode="json") for n in range(4)]}
        results = http.post("/v1/judge", json=body, timeout=120).json()["results"]
    for result in results:
        assert (result["outcome"], result["backend"], result["decided_by"]) == (
            "scored",
            "vllm",
            "model",
        ), result
        assert 0 <= result["probability"] <= 1
        assert result["score"] == (result["verdict"] == "correct")


def test_it_chats_and_refuses_what_does_not_fit(judge: Served) -> None:
    def ask(**body: object) -> tuple[int, dict[str, object]]:
        answer = http.post("/v1/chat/completions", json={"max_tokens": 4, **body})
        return answer.status_code, answer.json()

    question = [{"role": "user", "content": "What is 2 + 2?"}]
    with judge.http() as http:
        status, said = ask(messages=question, temperature=0, logprobs=True, top_logprobs=2)
        assert (status, said["usage"]["completion_tokens"]) == (200, 4)  # type: ignore[index]
        assert ask(messages=[{"role": "user", "content": "dog " * 9000}])[0] == 400
        assert ask(messages=question, response_format={"type": "yaml"})[0] == 400


def test_an_engine_that_dies_is_replaced_and_no_verdict_is_lost(judge: Served) -> None:
    (replica,) = judge.replicas()
    engines = engine_cores(replica)
    assert engines, [child.cmdline() for child in replica.children(recursive=True)]
    for engine in engines:
        engine.kill()

    async def ask() -> list[object]:
        client = JudgeClient(judge.settings(batch=4, canary=False))
        try:
            return list(await asyncio.gather(*(client.judge(item(n), 240) for n in range(4))))
        finally:
            await client.close()

    assert all(isinstance(result, JudgeVerdict) for result in asyncio.run(ask()))
    eventually(lambda: not psutil.pid_exists(replica.pid), "the broken replica ends", 60)
