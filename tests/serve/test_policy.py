"""The policy's endpoint during a real run: the official client, tokens of training, bad requests,
and engines that die.
"""

from __future__ import annotations

import base64
import io
import json
import signal
import stat
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from PIL import Image

from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.traces import Trace, branches
from rayloop.core.types import ImageSource, Message, Sampling, TrajectoryId
from tests.support.models import picture_model as picture_model
from tests.support.policies import Endpoint, command, endpoint
from tests.support.runs import ROOT, Run, run, settings

if TYPE_CHECKING:
    from openai import OpenAI

openai = pytest.importorskip("openai", reason="`make test-judge` installs it")
pytestmark = [pytest.mark.judge, pytest.mark.timeout(400)]


def picture(red: int) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (84, 56), (red, 40, 200)).save(encoded, "PNG")
    return encoded.getvalue()


def shown(red: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture(red)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def live(picture_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that trains for as long as the tests ask, and changes next to nothing, so that its
    weights stay those of the folder.
    """
    config = settings(
        tmp_path_factory.mktemp("live"), picture_model, steps=100_000, policy__optimizer__lr=1e-12
    )
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
    return openai.OpenAI(
        base_url=served.url,
        api_key=served.key,
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    )


ASK: dict[str, Any] = {
    "model": "run",
    "logprobs": True,
    "extra_body": {"return_token_ids": True},
    "max_tokens": 6,
    "seed": 3,
}


def test_an_endpoint_that_is_asked_to_end_does_so_without_a_word_of_failure(
    live: Run, tmp_path: Path
) -> None:
    """The first one of this module: the others share an endpoint."""
    with endpoint(live, folder=tmp_path) as alone:
        alone.ready()
        alone.process.send_signal(signal.SIGTERM)
        assert alone.process.wait(60) == 0, alone.text
        assert alone.text.strip().endswith("policy: received a signal, ending"), alone.text


def test_the_official_client_drives_the_policy_while_it_is_trained(
    client: OpenAI, live: Run
) -> None:
    (model,) = client.models.list().data
    assert model.id == "run"
    question = [{"role": "user", "content": [{"type": "text", "text": "Sort: 3 1 2"}, shown(9)]}]
    first = client.chat.completions.create(messages=question, n=3, **ASK)
    again = client.chat.completions.create(messages=question, n=3, **ASK)
    assert [c.message.content for c in first.choices] == [
        c.message.content for c in again.choices
    ], "a seed repeats"
    assert len({tuple(c.token_ids) for c in first.choices}) > 1
    for choice in first.choices:
        assert len(choice.logprobs.content) == len(choice.token_ids) <= 6
        assert all(token.logprob <= 0 for token in choice.logprobs.content)
    steps = len(live.metrics)
    live.until(lambda: len(live.metrics) > steps + 1, "the run goes on")
    later = client.chat.completions.create(messages=question, **ASK)
    assert later.model_extra["rayloop"]["step"] > first.model_extra["rayloop"]["step"], (
        "it is the current policy"
    )


def test_several_turns_with_pictures_are_a_trajectory_that_the_trainer_agrees_with(
    served: Endpoint, client: OpenAI, picture_model: Path
) -> None:
    from tests.engines.training import engine

    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Sort: 3 1 2"}, shown(9)]}
    ]
    answers = []
    for turn in range(3):
        answer = client.chat.completions.create(messages=messages, **ASK)
        answers.append(answer.model_dump())
        messages += [answer.choices[0].message.model_dump(exclude_none=True)]
        messages += [
            {"role": "user", "content": [{"type": "text", "text": "Again: "}, shown(30 * turn)]}
        ]
    for before, after in pairwise(answers):
        known = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
        assert after["prompt_token_ids"][: len(known)] == known
        assert after["rayloop"]["history"] == {
            "exact": True,
            "continues": f"{before['id']}/0",
            "why": None,
        }
    renderer = Renderer(ModelSettings(path=str(picture_model)))
    first = renderer.prompt([Message("user", ("Sort: 3 1 2", ImageSource(data=picture(9))))])
    assert answers[0]["prompt_token_ids"] == list(first.token_ids), "the tokens of an episode"

    with served.http() as http:
        answer = http.get(f"/traces/{answers[-1]['id']}/0").json()
    sampling = Sampling(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in answer.pop("sampling").items()}
    )
    trace = Trace.from_json(answer)
    assert trace.token_ids == branches(answers)[0].token_ids
    made = trace.trajectory(
        TrajectoryId(0, 0), "foreign", sampling, image_token=answer["image_token"]
    )
    flat = made.flatten()
    with engine(picture_model) as trainer:
        (theirs,) = trainer.logprobs([made])
    ours = flat.rollout_logprobs[flat.loss_mask]
    assert len(theirs) == len(ours) == sum(len(a["choices"][0]["token_ids"]) for a in answers)
    assert abs(np.asarray(theirs) - ours).max() < 1e-3, (
        "the log-probs are those of the policy, pictures and all"
    )


def test_the_official_client_reads_a_stream(client: OpenAI) -> None:
    question = [{"role": "user", "content": [{"type": "text", "text": "Sort: 3 1 2"}, shown(9)]}]
    plain = client.chat.completions.create(messages=question, **ASK)
    stream = client.chat.completions.create(
        messages=question, stream=True, stream_options={"include_usage": True}, **ASK
    )
    *said, last = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in said)
        == plain.choices[0].message.content
    )
    assert said[0].choices[0].token_ids == plain.choices[0].token_ids, "a seed repeats"
    assert last.usage.completion_tokens == plain.usage.completion_tokens


def test_metrics_are_prometheus_text_behind_the_key(served: Endpoint, client: OpenAI) -> None:
    client.chat.completions.create(messages=[{"role": "user", "content": "q"}], **ASK)
    place = served.url.removesuffix("/v1") + "/metrics"
    assert httpx.get(place, trust_env=False).status_code == 401
    with served.http() as http:
        answer = http.get(place).text
    assert 'policy_requests_total{outcome="ok",route="chat",run="run"}' in answer
    assert 'policy_engines{run="run"} 1.0' in answer


def test_what_is_refused_has_openais_form(served: Endpoint, client: OpenAI) -> None:
    assert stat.S_IMODE((served.folder / "policy.key").stat().st_mode) == 0o600
    assert served.key not in served.text
    body = {"model": "run", "messages": [{"role": "user", "content": "q"}]}
    with httpx.Client(base_url=served.url, trust_env=False) as http:
        assert http.get(served.url.removesuffix("/v1") + "/healthz").status_code == 200
        for method, path in (
            ("GET", "/models"),
            ("POST", "/chat/completions"),
            ("GET", "/traces/x/0"),
        ):
            assert http.request(method, path).status_code == 401
            assert (
                http.request(method, path, headers={"Authorization": "Bearer no"}).status_code
                == 403
            )
    with served.http() as http:
        large = http.post(
            "/chat/completions",
            json={**body, "messages": [{"role": "user", "content": "q" * 300_000}]},
        )
        assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
    with pytest.raises(openai.BadRequestError, match="top_logprobs: 2 is not supported"):
        client.chat.completions.create(**body, top_logprobs=2)
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-5'"):
        client.chat.completions.create(**{**body, "model": "gpt-5"})
    with pytest.raises(openai.BadRequestError, match=r"limits\.choices"):
        client.chat.completions.create(**body, n=5)
    for _ in range(2):
        answer = client.chat.completions.create(**body, max_tokens=2)
        assert answer.usage.completion_tokens <= 2


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "tool"])
)
NAMES = st.sampled_from(["role", "content", "type", "text"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
GOOD: dict[str, Any] = {
    "n": st.integers(1, 2),
    "seed": st.integers(0, 2**64),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3)),
    "temperature": st.floats(0, 2),
    "max_tokens": st.integers(1, 3),
    "min_tokens": st.integers(0, 9),
    "logprobs": st.booleans(),
    "return_token_ids": st.booleans(),
    "tool_choice": st.sampled_from(["auto", "none", "f"]),
    "top_p": st.sampled_from([1, 0.5]),
}
OTHERS: dict[str, Any] = dict.fromkeys(
    ("model", "tools", "continues", "stream", "response_format", "messages"), VALUES
)
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["<|im_end|>", "<tool_call>{}</tool_call>", "\x00", "\ud800"]
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS}
)


def test_no_request_makes_it_fail(served: Endpoint) -> None:
    """Right keys with wrong values, and half-right messages: an answer, or a refusal in OpenAI's
    form, never a failure.
    """
    well = st.fixed_dictionaries({}, optional=GOOD)
    ill = st.fixed_dictionaries({}, optional={**GOOD, **OTHERS, "n": VALUES, "stop": VALUES})
    odd = st.fixed_dictionaries({"role": VALUES, "content": VALUES}) | VALUES
    seen: Counter[int] = Counter()

    @hypothesis.settings(
        max_examples=250, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(well | ill, st.lists(MESSAGES, max_size=3) | st.lists(odd, max_size=2))
    def ask(changes: dict[str, Any], messages: list[Any]) -> None:
        question = {"role": "user", "content": "q"}
        body = {"model": "run", "max_tokens": 1, "messages": [*messages, question], **changes}
        answer = http.post(
            "/chat/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        seen[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            assert {"message", "type", "code"} <= answer.json()["error"].keys()

    with served.http() as http:
        ask()
        assert http.post("/chat/completions", content=b"\xff{").status_code == 400
    assert seen[200] > 25
    assert seen[400] > 50


def test_requests_outlive_an_engine_that_is_killed(
    served: Endpoint, client: OpenAI, live: Run
) -> None:
    question = [{"role": "user", "content": "Sort: 4 2 1"}]
    before = client.chat.completions.create(messages=question, **ASK)
    engine = live.actor("RolloutActor")
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(client.chat.completions.create, messages=question, **ASK) for _ in range(8)
        ]
        engine.kill()
        asked += [
            pool.submit(client.chat.completions.create, messages=question, **ASK) for _ in range(8)
        ]
        answers = [one.result() for one in asked]
    assert len(answers) == 16
    now = client.chat.completions.create(messages=question, **ASK)
    assert live.actor("RolloutActor").pid != engine.pid
    assert now.model_extra["rayloop"]["step"] >= before.model_extra["rayloop"]["step"]


def test_a_run_that_is_not_live_is_refused_in_one_line(live: Run, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        done = subprocess.run(
            command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert "is not a live run" in refused("--run", tmp_path)
    copied = json.loads((live.folder / "cluster.json").read_text(encoding="utf-8")) | {
        "address": "127.0.0.1:9"
    }
    (tmp_path / "cluster.json").write_text(json.dumps(copied), encoding="utf-8")
    assert "is not a live run of yours" in refused("--run", tmp_path)
    assert "without a key only loopback" in refused(
        "--run", live.folder, "--insecure", "http.host=0.0.0.0"
    )
    assert "limits.hold" in refused("--run", live.folder, "limits.hold=3")


def test_a_run_is_found_by_its_name_and_an_endpoint_is_not_served_twice(
    live: Run, served: Endpoint
) -> None:
    place = json.loads((live.folder / "cluster.json").read_text(encoding="utf-8"))
    where = [
        "--address",
        place["address"],
        "--token-file",
        place["token_file"],
        "--announce",
        live.folder / "other.json",
    ]
    for name, why in (
        ("run", "Ray Serve has an application named policy-run"),
        ("nobody", "it is not live. Live runs of this cluster: run"),
    ):
        done = subprocess.run(
            command("--name", name, *where), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr[-2000:]
    served.ready()


def test_the_endpoint_ends_with_the_run_and_leaves_nothing(live: Run, served: Endpoint) -> None:
    """The last one of this module: it ends the run."""
    assert stat.S_IMODE((live.folder / "cluster.json").stat().st_mode) == 0o600
    live.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0, served.text
    assert "the run has ended" in served.text
    live.ends(75)
    assert not (live.folder / "cluster.json").exists()
    assert not (live.folder / "policy.json").exists()
