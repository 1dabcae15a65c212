"""``bench judge``: what the judge's client and Ray Serve add to the time of the model, both sides
alternately.

The model's server is a stub that takes a fixed time for each reply and answers so many at once:
what is measured is all the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvicorn
import yaml

from benchmarks.measure import BenchFailed, machine
from rayloop.judge.api import JudgeItem, JudgeRequest
from rayloop.judge.client import ClientSettings, JudgeClient
from rayloop.judge.grader import Grader
from rayloop.judge.rubric import load_rubrics
from rayloop.serve_apps.judge.openai_model import OpenAIModel
from rayloop.serve_apps.settings import OpenAIBackendSettings

BATCH_ITEMS = 16
"""Items of one request."""
START_TIMEOUT_S = 120.0
"""Seconds that a process may take to start."""
ANSWER_TIMEOUT_S = 600.0


class Stub:
    """An ASGI application: a judge that answers at once, and the server of a model that takes
    ``seconds``, ``slots`` at once.
    """

    def __init__(self, seconds: float, slots: int) -> None:
        self._seconds, self._slots = seconds, asyncio.Semaphore(slots)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/v1/judge":
            verdict = {
                "verdict": "correct",
                "score": 1.0,
                "fingerprint": "stub",
                "backend": "rule",
                "decided_by": "model",
            }
            answer: dict[str, Any] = {
                "results": [{"outcome": "scored", **verdict} for _ in json.loads(data)["items"]]
            }
        else:
            async with self._slots:
                await asyncio.sleep(self._seconds)
            text = '{"reason": "stub", "verdict": "correct"}'
            answer = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        body = json.dumps(answer).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured")
    parser.add_argument(
        "--model-seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="that the model takes for a verdict",
    )
    parser.add_argument(
        "--model-slots", type=int, default=32, metavar="N", help="verdicts that it works on at once"
    )
    parser.add_argument("--trajectories", type=int, default=512, help="that are judged")
    parser.add_argument("--distinct", type=int, default=256, help="different answers among them")
    parser.add_argument("--calls", type=int, default=200, help="single calls per round")
    parser.set_defaults(run=_judge)


def _judge(arguments: argparse.Namespace) -> int:
    with (
        tempfile.TemporaryDirectory() as temporary,
        _stub(arguments) as url,
        _served(Path(temporary), url) as (judge, key),
    ):
        found = asyncio.run(_measure(arguments, url, judge, key))
    print(json.dumps({**found, "machine": machine()}))
    return 0


async def _measure(a: argparse.Namespace, stub: str, judge: str, key: Path) -> dict[str, Any]:
    rounds = []
    for number in range(a.rounds):
        rounds.append(
            {
                **await _single_calls(stub, a.calls, number),
                **await _hop(judge, a.calls),
                **await _throughput(a, stub, judge, key, number),
                **await _trajectories(a, stub, judge, key, number),
            }
        )
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    whole = {name: median(one[name] for one in rounds) for name in rounds[0]}
    ratios = {
        "client_added_ms": whole["client_ms"] - whole["httpx_ms"],
        "serve_to_direct_items_per_s": whole["serve_items_per_s"] / whole["direct_items_per_s"],
        "trajectories_to_distinct_s": whole["trajectories_s"] / whole["distinct_s"],
    }
    return {key: round(value, 4) for key, value in {**ratios, **whole}.items()}


def _item(number: int, kind: str) -> JudgeItem:
    """One that no rule decides."""
    return JudgeItem(
        question="What is shown?",
        reference=f"A big dog, {kind} {number}",
        answer=f"a large dog of {kind} {number}",
    )


async def _times(call: Callable[[int], Awaitable[Any]], count: int) -> list[float]:
    """Milliseconds of ``count`` calls, one after the other."""
    found = []
    for number in range(count):
        began = time.perf_counter()
        await call(number)
        found.append(1000 * (time.perf_counter() - began))
    return found


async def _single_calls(stub: str, calls: int, number: int) -> dict[str, float]:
    """Medians of a bare httpx call, of the client's, and of the client's when it knows the verdict,
    in parts that alternate.
    """
    client, part = JudgeClient(ClientSettings(url=stub)), max(1, calls // 10)
    bare: list[float] = []
    ours: list[float] = []
    known: list[float] = []
    async with httpx.AsyncClient(base_url=stub, trust_env=False) as http:
        for block in range(10):
            items = [_item(n, f"single {number}.{block}") for n in range(part)]
            bodies = [JudgeRequest(items=(item,)).model_dump(mode="json") for item in items]
            post = partial(http.post, "/v1/judge")
            bare += await _times(lambda n, bodies=bodies, post=post: post(json=bodies[n]), part)  # type: ignore[misc]
            ours += await _times(
                lambda n, items=items: client.judge(items[n], ANSWER_TIMEOUT_S),  # type: ignore[misc]
                part,
            )
            known += await _times(
                lambda n, items=items: client.judge(items[n], ANSWER_TIMEOUT_S),  # type: ignore[misc]
                part,
            )
    await client.close()
    return {"httpx_ms": median(bare), "client_ms": median(ours), "cache_hit_ms": median(known)}


async def _hop(judge: str, calls: int) -> dict[str, float]:
    """Of a handler that does nothing, behind Ray Serve."""
    async with httpx.AsyncClient(base_url=judge, trust_env=False) as http:
        return {"serve_hop_ms": median(await _times(lambda _: http.get("/healthz"), calls))}


async def _throughput(
    a: argparse.Namespace, stub: str, judge: str, key: Path, number: int
) -> dict[str, float]:
    """Items per second in requests of BATCH items, enough at once to fill the model: the backend
    itself, and through Serve.
    """
    flight: int = max(1, 2 * a.model_slots // BATCH_ITEMS)
    headers = {"Authorization": f"Bearer {key.read_text(encoding='utf-8').strip()}"}

    async def measure(send: Callable[[Sequence[JudgeItem]], Awaitable[Any]], kind: str) -> float:
        batches = iter(
            [
                [_item(BATCH_ITEMS * n + i, f"{kind} {number}") for i in range(BATCH_ITEMS)]
                for n in range(4 * flight)
            ]
        )

        async def worker() -> None:
            for batch in batches:
                await send(batch)

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(flight)))
        seconds = time.perf_counter() - began
        return 4 * flight * BATCH_ITEMS / seconds

    model = OpenAIModel(_model(stub))
    async with httpx.AsyncClient(
        base_url=judge, trust_env=False, timeout=ANSWER_TIMEOUT_S, headers=headers
    ) as http:

        async def post(items: Sequence[JudgeItem]) -> None:
            answer = await http.post(
                "/v1/judge", json=JudgeRequest(items=tuple(items)).model_dump(mode="json")
            )
            answer.raise_for_status()

        grader = Grader(load_rubrics(), model, "openai")
        direct = await measure(grader.judge, "direct")
        served = await measure(post, "served")
    await model.close()
    return {"direct_items_per_s": direct, "serve_items_per_s": served}


async def _trajectories(
    a: argparse.Namespace, stub: str, judge: str, key: Path, number: int
) -> dict[str, float]:
    """Seconds for all trajectories through client and Serve, and those that the backend itself
    takes for the distinct answers.
    """
    model = OpenAIModel(_model(stub))
    grader = Grader(load_rubrics(), model, "openai")
    began = time.perf_counter()
    await grader.judge([_item(n, f"backend {number}") for n in range(a.distinct)])
    distinct = time.perf_counter() - began
    await model.close()
    client = JudgeClient(ClientSettings(url=judge, key_file=str(key)))
    items = [_item(n % a.distinct, f"run {number}") for n in range(a.trajectories)]
    began = time.perf_counter()
    await asyncio.gather(*(client.judge(item, ANSWER_TIMEOUT_S) for item in items))
    whole = time.perf_counter() - began
    await client.close()
    return {"trajectories_s": whole, "distinct_s": distinct}


def _model(stub: str) -> OpenAIBackendSettings:
    return OpenAIBackendSettings(url=f"{stub}/v1", model="stub", concurrency=256)


@contextmanager
def _stub(arguments: argparse.Namespace) -> Iterator[str]:
    """The stub in a process of its own; yields its URL."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.judge",
        str(arguments.model_seconds),
        str(arguments.model_slots),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise BenchFailed(f"the stub ended with {process.wait()}")
            _until_answered(f"http://127.0.0.1:{port}/v1/judge", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def _served(folder: Path, stub: str) -> Iterator[tuple[str, Path]]:
    """``judge serve`` in front of the stub; yields its URL and key file."""
    args = {
        "backend": _model(stub).model_dump(),
        "cache": {"size": 0},
        "limits": {"held": 4096},
        "canary": {"right": False},
    }
    config = {"http_options": {"port": 0}, "applications": [{"args": args}]}
    (folder / "judge.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    announced = folder / "judge.json"
    command = [
        sys.executable,
        "-m",
        "rayloop",
        "judge",
        "serve",
        str(folder / "judge.yaml"),
        "--announce",
        str(announced),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(command, stdout=sys.stderr, env=environment) as process:
        try:
            end = time.monotonic() + START_TIMEOUT_S
            while not announced.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise BenchFailed(
                        f"no judge within {START_TIMEOUT_S:g} s (exit code {process.poll()}); see"
                        " above"
                    )
                time.sleep(0.1)
            yield json.loads(announced.read_text(encoding="utf-8"))["url"], folder / "judge.key"
        finally:
            process.terminate()


def _until_answered(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            httpx.post(url, json={"items": []}, trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise BenchFailed(
        f"{url} did not answer within {START_TIMEOUT_S:g} s (exit code {process.poll()})"
    )


def main(seconds: str, slots: str) -> None:
    """Serve the stub on a free port, which is printed."""
    config = uvicorn.Config(
        Stub(float(seconds), int(slots)),
        host="127.0.0.1",
        port=0,
        log_level="critical",
        lifespan="off",
    )
    listening = config.bind_socket()
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
