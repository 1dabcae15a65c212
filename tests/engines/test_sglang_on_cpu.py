"""SGLang itself on a CPU: its answers under weights that its processes receive by broadcast, and
what is served when that fails.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayloop.core.failures import BroadcastFailed, WeightSyncError, WorkerLost
from rayloop.core.protocols import Manifest
from rayloop.core.types import Completion, Version
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.models.saving import save_model
from rayloop.engines.settings import ModelSettings
from rayloop.transports import manifest
from rayloop.transports.collective import BroadcastReceiver, BroadcastSender
from rayloop.transports.plain import ArraySender
from rayloop.transports.settings import CollectiveTransport
from tests.contracts.test_engine import GREEDY, START, close, questions
from tests.engines.prompts import hf_greedy, prompt
from tests.support.sglang_cpu import Rollout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(580)]

TIMEOUT = 40.0
NEXT = Version(0, 1)
BETWEEN = "model.layers.1.self_attn.k_proj.weight"
"""A part of a layer whose parts SGLang merges."""
SETTINGS = CollectiveTransport().within(TIMEOUT / CollectiveTransport.share, 1)


class Policy:
    """Its first rank, an engine, and ``others``, further members of the group."""

    def __init__(self, folder: Path, others: int = 0) -> None:
        self.folder, self.start = folder, hf_state(load_model(ModelSettings(path=str(folder))))
        self.sender, self.failures, self.buckets_sent = BroadcastSender(SETTINGS, "127.0.0.1"), 0, 0
        self.others = [BroadcastReceiver(SETTINGS) for _ in range(others)]
        self.send_bucket, self.sender._send_bucket = self.sender._send_bucket, self._send_bucket  # type: ignore[method-assign]
        self.before: Any = lambda number, last: None
        self.engine = Rollout(folder, SETTINGS)

    def _send_bucket(self, *bucket: Any) -> None:
        self.before(self.buckets_sent, not bucket)
        self.buckets_sent += 1
        self.send_bucket(*bucket)

    def stream(
        self, weights: Iterable[tuple[str, Tensor]], version: Version = NEXT, *running: Any
    ) -> list[Any]:
        """What the sender, the engine and the others returned or raised."""
        self.buckets_sent = 0
        limit = self.sender._settings.timeout
        meeting = self.sender.invite(tuple(range(1 + len(self.others))), self.failures, limit)
        with ThreadPoolExecutor() as threads:
            going: list[Future[Any]] = [
                threads.submit(self.sender.send, version, weights, meeting),
                self.engine.call("take", version, meeting, *running),
                *(
                    threads.submit(other.deserialize, Manifest(version, {}), meeting)
                    for other in self.others
                ),
            ]
            ends = [future.exception(120) or future.result() for future in going]
        self.failures += any(isinstance(end, BroadcastFailed) for end in ends)
        return ends

    def follows(self, folder: Path, version: Version) -> None:
        """Greedy tokens and log-probs are those of transformers for the model of ``folder``."""
        requests = questions(self.folder)[:6]
        done: list[Completion] = self.engine.call(
            "generate", *((request, GREEDY) for request in requests)
        ).result(120)
        for request, completion in zip(requests, done, strict=True):
            assert list(completion.token_ids) == hf_greedy(folder, request, GREEDY.max_tokens)
            close(folder, request, completion, GREEDY)
        assert {one.version for one in done} == {version}
        assert self.engine.call("state").result(20)[0] == version

    def other(self, folder: Path) -> dict[str, Tensor]:
        """Other weights in every tensor, and a model folder with them."""
        noise = torch.Generator().manual_seed(0)
        other = {
            name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise)
            for name, tensor in self.start.items()
        }
        save_model(str(self.folder), folder, other)
        return other


@pytest.fixture(scope="module")
def policy(tiny_text: Path) -> Iterator[Policy]:
    made = Policy(tiny_text)
    yield made
    made.engine.close()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveTransport, "bucket_bytes", 60_000)


def test_the_answers_are_those_of_the_weights_that_were_sent(
    policy: Policy, tmp_path: Path
) -> None:
    """The rollout actor is no member of the group."""
    with pytest.raises(WorkerLost, match="no weights"):
        policy.engine.call("generate", (prompt(policy.folder, "too early"), GREEDY)).result(20)
    other = policy.other(tmp_path / "other")
    for step, (folder, weights) in enumerate(
        [(policy.folder, policy.start), (tmp_path / "other", other)] * 2
    ):
        assert policy.stream(weights.items(), Version(0, step)) == [None, []]
        assert policy.buckets_sent > 6, "buckets"
        policy.follows(folder, Version(0, step))
    assert policy.engine.call("state").result(20) == (Version(0, 3), None)


def test_requests_that_are_running_go_on_with_the_new_weights(
    policy: Policy, tmp_path: Path
) -> None:
    other, sampling = policy.other(tmp_path / "other"), dataclasses.replace(GREEDY, max_tokens=400)
    assert policy.stream(policy.start.items(), START) == [None, []]
    none, done = policy.stream(
        other.items(),
        NEXT,
        *((prompt(policy.folder, f"What is {n} + 9?"), sampling) for n in range(4)),
    )
    assert none is None
    assert {(one.version, len(one.token_ids)) for one in done} == {(START, 400)}
    policy.follows(tmp_path / "other", NEXT)


def broken(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        if name == BETWEEN:
            raise RuntimeError("a rank is gone")
        yield name, tensor


FAULTS = {
    "damaged": f"{BETWEEN}: corrupt",
    "broken": "could not receive",
    "dropped": f"lacks 1 tensors of the engine's model: {BETWEEN}",
    "misshapen": "SGLang did not take the weights",
}


@pytest.mark.parametrize("how", FAULTS)
def test_what_fails_midway_is_named_serves_nothing_and_leaves_nothing(
    how: str, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next weights come by the same way, or from the object store where a broadcast broke off."""
    other, honest = policy.other(tmp_path / "other"), manifest.manifest

    def lying(version: Version, tensors: Any) -> Manifest:
        made = honest(version, tensors)
        records = {
            n: dataclasses.replace(r, checksum=r.checksum ^ (n == BETWEEN))
            for n, r in made.tensors.items()
        }
        return dataclasses.replace(made, tensors=records)

    assert policy.stream(policy.start.items(), START) == [None, []]
    given = {
        "broken": broken(other),
        "dropped": {n: t for n, t in other.items() if n != BETWEEN}.items(),
        "misshapen": {n: t[:, 1:] if n == BETWEEN else t for n, t in other.items()}.items(),
    }
    with monkeypatch.context() as patch:
        if how == "damaged":
            patch.setattr(manifest, "manifest", lying)
        _, failed = policy.stream(given.get(how, other.items()))
    assert isinstance(failed, BroadcastFailed if how == "broken" else WeightSyncError)
    assert FAULTS[how] in str(failed)
    with pytest.raises(WorkerLost, match="no weights"):
        policy.engine.call("generate", (prompt(policy.folder, "What"), GREEDY)).result(20)
    if how == "broken":
        update = ArraySender().serialize(NEXT, other)
        policy.engine.call("load", update.manifest, update.source).result(60)
    else:
        assert policy.stream(other.items()) == [None, []]
    policy.follows(tmp_path / "other", NEXT)


@pytest.mark.parametrize("phase", ["meeting", "middle"])
def test_an_engine_whose_process_is_killed_is_lost_and_the_others_have_the_copy(
    phase: str, tiny_text: Path
) -> None:
    policy = Policy(tiny_text, others=1)
    try:
        assert policy.stream(policy.start.items(), START)[:2] == [None, []]
        [scheduler] = policy.engine.schedulers()
        middle = policy.buckets_sent // 2

        def kill(number: int, last: bool) -> None:
            if number == middle:
                os.kill(scheduler.pid, signal.SIGKILL)

        if phase == "meeting":
            policy.failures += 1  # a new group
            scheduler.kill()
        else:
            policy.before = kill
        began = time.monotonic()
        sent, lost, other = policy.stream(policy.start.items())
        assert time.monotonic() - began < 3 * TIMEOUT
        assert isinstance(lost, BrokenProcessPool), "it ends its rollout actor"
        assert isinstance(sent, BroadcastFailed)
        assert isinstance(other, BroadcastFailed)
        update = policy.sender.sent()
        assert (
            policy.others[0].deserialize(update.manifest, update.source).keys()
            == policy.start.keys()
        )
    finally:
        policy.engine.close()
