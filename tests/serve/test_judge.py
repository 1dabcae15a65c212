"""The judge on a real Ray Serve: interface, key, limits, and what a run notices when replicas die."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from rayloop.judge.api import JudgeItem, JudgeUnscored, JudgeVerdict, VerdictKind
from rayloop.judge.client import JudgeClient
from rayloop.judge.health import BreakerState
from tests.support.judges import ModelStub, Served
from tests.support.runs import ROOT, tagged

pytestmark = [pytest.mark.judge, pytest.mark.timeout(400)]


def item(number: int, right: bool = True) -> JudgeItem:
    """One that no rule decides."""
    answer = f"a dog of kind {number}" if right else f"a cat of kind {number}"
    return JudgeItem(
        question="What is shown?", reference=f"A dog of kind {number}", answer=answer, fresh=True
    )


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rayloop", "judge", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_says_how_it_is_and_what_it_is(judge: Served) -> None:
    with judge.http() as http:
        assert http.get("/healthz").json() == {"status": "alive"}
        assert http.get("/readyz").json() == {"ready": True, "failing": {}}
        version = http.get("/version").json()
        assert (version["backend"], version["model"]) == ("openai", "stub")
        assert version["fingerprint"].startswith("openai-")
        assert "judge_canary_ok" in http.get("/metrics").text


def test_only_healthz_is_open(judge: Served) -> None:
    assert stat.S_IMODE(judge.key_file.stat().st_mode) == 0o600
    assert judge.key_file.read_text(encoding="utf-8").strip() not in judge.text
    with httpx.Client(base_url=judge.url, trust_env=False) as http:
        assert http.get("/healthz").status_code == 200
        for method, path in (
            ("GET", "/readyz"),
            ("GET", "/version"),
            ("GET", "/metrics"),
            ("POST", "/v1/judge"),
            ("POST", "/v1/chat/completions"),
        ):
            without = http.request(method, path)
            assert (without.status_code, without.headers["www-authenticate"]) == (401, "Bearer")
            assert (
                http.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code
                == 403
            )


def test_it_judges_one_item_or_many(judge: Served) -> None:
    with judge.http() as http:
        (one,) = http.post("/v1/judge", json=item(1).model_dump(mode="json")).json()["results"]
        assert (one["verdict"], one["decided_by"], one["backend"], one["cached"]) == (
            "correct",
            "model",
            "openai",
            False,
        )
        items = [item(n, right=n % 2 == 0).model_dump(mode="json") for n in range(8)]
        many = http.post("/v1/judge", json={"items": items}).json()["results"]
        assert [result["score"] for result in many] == [1.0, 0.0] * 4
        easy = http.post(
            "/v1/judge", json={"question": "6 x 7?", "reference": "42", "answer": "42.0"}
        ).json()
        assert easy["results"][0]["decided_by"] == "rules"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"items": [{"question": "q", "reference": "r", "answer": "a"}] * 17}, 422),
        ({"question": "q", "reference": "r", "answer": "a" * 70_000}, 413),
        (
            {
                "question": "q",
                "reference": "r",
                "answer": "a",
                "images": ["http://169.254.169.254/x.png"],
            },
            422,
        ),
        ({"question": "q", "reference": "r", "answer": "a", "images": ["/etc/passwd"]}, 422),
        ({"question": "q", "reference": "r", "answer": "a", "base_url": "http://x"}, 422),
    ],
)
def test_what_it_refuses(judge: Served, body: dict[str, Any], status: int) -> None:
    with judge.http() as http:
        answer = http.post("/v1/judge", json=body)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_a_model_that_is_too_slow_is_unscored_and_never_wrong(
    judge: Served, model: ModelStub
) -> None:
    model.seconds = 16.0
    try:
        with judge.http() as http:
            answer = http.post("/v1/judge", json=item(2).model_dump(mode="json"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
        assert float(answer.headers["retry-after"]) > 0
    finally:
        model.seconds = 0.0
        judge.ready(2)


def test_the_official_client_speaks_with_the_same_model(judge: Served) -> None:
    import openai

    key = judge.key_file.read_text(encoding="utf-8").strip()
    with (
        judge.http() as http,
        openai.OpenAI(base_url=f"{judge.url}/v1", api_key=key, http_client=http) as client,
    ):
        asked: Any = [{"role": "user", "content": "What is 2 + 2?"}]
        said = client.chat.completions.create(model="judge", messages=asked, max_tokens=5)
        assert said.choices[0].message.content == "Four."
        fetched: Any = [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}
                ],
            }
        ]
        with pytest.raises(openai.UnprocessableEntityError, match="image_url"):
            client.chat.completions.create(model="judge", messages=fetched)


def test_check_is_one_line_and_an_exit_code(judge: Served) -> None:
    good = command("check", "auto", "--announce", judge.announced)
    assert (good.returncode, good.stdout.count("\n")) == (0, 1), good.stderr
    assert good.stdout.startswith(f"ready: {judge.url} openai stub openai-")
    for arguments, reason in (
        ([judge.url], "HTTP 401"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1"),
    ):
        bad = command("check", *arguments)
        assert (bad.returncode, bad.stderr.count("\n")) == (1, 1), bad.stderr
        assert reason in bad.stderr


def test_no_request_makes_it_fail(judge: Served) -> None:
    """300 requests made from the OpenAPI document, right and wrong ones: no status that is not
    documented, of 5xx only 503.
    """
    import schemathesis
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_url(f"{judge.url}/openapi.json")
    statuses: Counter[int] = Counter()
    for operation in (found.ok() for found in schema.get_all_operations()):
        modes = (
            list(GenerationMode)
            if operation.method.upper() == "POST"
            else [GenerationMode.POSITIVE]
        )
        for mode in modes:

            @settings(
                max_examples=75 if len(modes) > 1 else 1,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def fuzz(case: schemathesis.Case) -> None:
                answer = case.call(headers=judge.headers)
                statuses[answer.status_code] += 1
                assert answer.status_code < 500 or answer.status_code == 503, case.as_curl_command()
                case.validate_response(
                    answer, checks=[status_code_conformance, response_schema_conformance]
                )

            fuzz()
    assert statuses.total() >= 300
    assert {200, 422} <= set(statuses), statuses


SAME_CLUSTER = """
import asyncio
from rayloop.launch.ray_variables import private_cluster

with private_cluster() as folder:
    import ray

    from rayloop.serve_apps.judge.address import RayDiscovery, announce_in_ray, unclaimed
    from rayloop.judge.discovery import Address
    from rayloop.core.failures import ConfigError, InfrastructureFailure

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    find = RayDiscovery(RayDiscovery.Settings())
    unclaimed("judge")
    actor = announce_in_ray("judge", Address(url="http://here:1", key_file="k"))
    print(asyncio.run(find()).url)
    try:
        unclaimed("judge")
    except ConfigError as error:
        print(str(error).partition(".")[0])
    ray.kill(actor)
    try:
        asyncio.run(find())
    except InfrastructureFailure as error:
        print(error)
    ray.shutdown()
"""


def test_runs_in_the_same_ray_cluster_find_it_without_a_file() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAME_CLUSTER], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines == [
        "http://here:1",
        "a judge named judge is served in this Ray cluster already",
        "no judge named judge is served in this Ray cluster",
    ], done.stderr


def test_a_second_judge_in_the_same_cluster_is_refused_and_the_first_goes_on(
    judge: Served, tmp_path: Path
) -> None:
    """Ray Serve has one proxy per cluster: it would ignore other options, and its end is the end of
    everybody's applications.
    """
    replicas = [replica.pid for replica in judge.ready(2)]
    temporary = Path(psutil.Process(judge.process.pid).environ()["TMPDIR"])
    (token,) = temporary.glob("rayloop-*/token")
    words = [word for process in tagged(judge.tag) for word in process.cmdline()]
    (address,) = {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    for name, why in (
        ("judge", "a judge named judge is served in this Ray cluster already"),
        ("other", "the application judge answers at / of this cluster's Ray Serve"),
    ):
        (tmp_path / "judge.yaml").write_text(
            f"applications: [{{name: {name}}}]\n", encoding="utf-8"
        )
        made = command(
            "serve",
            tmp_path / "judge.yaml",
            "--announce",
            tmp_path / "judge.json",
            "--address",
            address,
            "--token-file",
            token,
        )
        assert (made.returncode, why in made.stderr) == (2, True), made.stderr[-2000:]
    assert judge.process.poll() is None
    assert [replica.pid for replica in judge.ready(2)] == replicas


ROOM = """
from rayloop.launch.ray_variables import private_cluster

with private_cluster() as folder:
    import ray
    from ray import serve

    from rayloop.cluster.stages.serving import end, free_port, room
    from rayloop.core.failures import ConfigError
    from rayloop.serve_apps.settings import HttpOptions

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Other:
        def __call__(self):
            return ""

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    port = free_port("127.0.0.1")
    print(">", room("judge", HttpOptions()))
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    print(">", room("judge", HttpOptions(port=port)) == room("judge", HttpOptions(port=0)) == port)
    for options in (HttpOptions(port=port % 60000 + 1), HttpOptions(host="0.0.0.0", port=port)):
        try:
            room("judge", options)
        except ConfigError as error:
            print(">", "cannot answer at" in str(error), f"port={port}" in str(error))
    serve.run(Other.bind(), name="other", route_prefix="/other")
    serve.run(Other.bind(), name="judge", route_prefix="/")
    end("judge", started=True)
    print(">", sorted(serve.status().applications))
    end("other", started=True)
    print(">", room("judge", HttpOptions()))
    ray.shutdown()
"""


def test_a_judge_fits_into_a_ray_serve_that_has_room_and_ends_only_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROOM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [
        line[2:] for line in done.stdout.splitlines() if line.startswith("> ")
    ]  # Ray writes there, too
    assert lines == ["0", "True", "True True", "True True", "['other']", "0"], done.stderr[-3000:]


async def ask(
    client: JudgeClient, items: Sequence[JudgeItem], patience: float
) -> list[JudgeVerdict | JudgeUnscored]:
    return list(await asyncio.gather(*(client.judge(one, patience) for one in items)))


def not_right(
    results: Sequence[JudgeVerdict | JudgeUnscored],
) -> list[JudgeVerdict | JudgeUnscored]:
    """Those without the verdict that they deserve: even items are right, odd ones wrong."""
    deserved = (
        VerdictKind.INCORRECT if n % 2 else VerdictKind.CORRECT for n in range(len(results))
    )
    pairs = zip(results, deserved, strict=True)
    return [one for one, kind in pairs if isinstance(one, JudgeUnscored) or one.verdict is not kind]


def test_a_replica_killed_under_load_fails_no_verdict(judge: Served, model: ModelStub) -> None:
    results = asyncio.run(_one_killed(judge, model))
    assert len(results) == 400
    assert not not_right(results)


async def _one_killed(judge: Served, model: ModelStub) -> list[JudgeVerdict | JudgeUnscored]:
    first, _ = judge.ready(2)[:2]
    model.seconds = 0.05
    client = JudgeClient(judge.settings(batch=4, concurrency=8))
    try:
        asking = asyncio.create_task(ask(client, [item(n, n % 2 == 0) for n in range(400)], 120))
        seen = len(model.bodies)
        while len(model.bodies) < seen + 40:
            await asyncio.sleep(0.01)
        first.kill()
        results = await asking
    finally:
        model.seconds = 0.0
        await client.close()
    assert first not in judge.ready(2)
    return results


def test_all_replicas_gone_for_20_seconds_opens_the_breaker_and_loses_no_verdict(
    judge: Served,
) -> None:
    results = asyncio.run(_all_killed(judge))
    assert len(results) == 40
    assert not not_right(results)


async def _all_killed(judge: Served) -> list[JudgeVerdict | JudgeUnscored]:
    judge.ready(2)
    client = JudgeClient(
        judge.settings(
            batch=4, concurrency=4, breaker_failures=3, read_timeout=5.0, request_timeout=8.0
        )
    )
    states = set()
    try:
        asking = None
        until = time.monotonic() + 20
        while time.monotonic() < until:
            judge.kill()
            if asking is None:
                asking = asyncio.create_task(
                    ask(client, [item(n, n % 2 == 0) for n in range(40)], 120)
                )
            states.add(client.breaker.state)
            await asyncio.sleep(0.1)
        assert BreakerState.OPEN in states
        assert asking is not None
        assert not asking.done()
        return await asking
    finally:
        await client.close()
    judge.ready(2)
