"""Weights that vLLM's workers receive themselves, bucket by bucket: what is answered then, and what
is served when it fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from rayloop.core.failures import BroadcastFailed, WeightSyncError, WorkerLost
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.engines.generation import vllm
from rayloop.transports import manifest
from rayloop.transports.collective import BroadcastReceiver, BroadcastSender
from rayloop.transports.settings import CollectiveTransport
from tests.contracts.test_engine import (
    ENGINES,
    GREEDY,
    START,
    Served,
    agree,
    dropped,
    looks,
    moved,
    unknown_between,
)
from tests.engines.prompts import prompt, vision_tokens
from tests.support.vllm_processes import engine_workers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TIMEOUT = 20.0
NEXT = Version(0, 1)
BETWEEN = "model.layers.1.self_attn.k_proj.weight"
"""A part of a layer whose parts vLLM merges."""


class Policy:
    """Its first rank, which sends in a thread, and the rollout actor's half; ``others``: further
    members of the group.
    """

    def __init__(self, others: int = 0) -> None:
        settings = CollectiveTransport().within(TIMEOUT / CollectiveTransport.share, 1)
        self.sender, self.failures, self.buckets_sent = BroadcastSender(settings, "127.0.0.1"), 0, 0
        self.receivers = [BroadcastReceiver(settings) for _ in range(1 + others)]
        self.send_bucket, self.sender._send_bucket = self.sender._send_bucket, self._send_bucket  # type: ignore[method-assign]
        self.before: Any = lambda number, last: None

    def _send_bucket(self, *bucket: Any) -> None:
        self.before(self.buckets_sent, not bucket)
        self.buckets_sent += 1
        self.send_bucket(*bucket)

    async def stream(
        self, engine: Any, weights: Iterable[tuple[str, Tensor]], version: Version = NEXT
    ) -> list[Any]:
        """What the sender, the engine and the others returned or raised."""
        self.buckets_sent = 0
        limit = self.sender._settings.timeout
        meeting = self.sender.invite(tuple(range(len(self.receivers))), self.failures, limit)
        first, *others = self.receivers
        ends = await asyncio.gather(
            asyncio.to_thread(self.sender.send, version, weights, meeting),
            first.take(engine, Manifest(version, {}), meeting),
            *(
                asyncio.to_thread(other.deserialize, Manifest(version, {}), meeting)
                for other in others
            ),
            return_exceptions=True,
        )
        self.failures += any(isinstance(end, BroadcastFailed) for end in ends)
        return ends


@pytest.fixture(scope="module")
def served(tiny_vlm: Path) -> Iterator[Served]:
    made = Served("vllm", tiny_vlm)
    yield made
    made.close()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveTransport, "bucket_bytes", 60_000)


def follows(served: Served, folder: Path, version: Version) -> None:
    sampling = dataclasses.replace(GREEDY, banned_tokens=vision_tokens(served.folder))
    done = agree(served, folder, looks(served.folder), sampling)
    assert {one.version for one in done} == {served.engine.health().version} == {version}


def test_the_answers_are_those_of_the_weights_that_were_sent(
    served: Served, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bytes of them pass through the process of the rollout actor, and none through a file."""
    for owner, name in (
        (policy.receivers[0], "deserialize"),
        (policy.receivers[0], "_receive_bucket"),
        (vllm, "written"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("not here"))
    other = moved(served, tmp_path / "other")
    for step, (folder, weights) in enumerate(
        [(served.folder, served.start), (tmp_path / "other", other)] * 2
    ):
        assert served.run(policy.stream(served.engine, weights.items(), Version(0, step))) == [
            None,
            None,
        ]
        assert policy.buckets_sent > 6, "buckets"
        follows(served, folder, Version(0, step))


def test_requests_that_are_running_go_on_with_the_new_weights(
    served: Served, policy: Policy, tmp_path: Path
) -> None:
    other, sampling = moved(served, tmp_path / "other"), dataclasses.replace(GREEDY, max_tokens=200)

    async def test() -> list[Any]:
        assert await policy.stream(served.engine, served.start.items(), START) == [None, None]
        asked = [prompt(served.folder, f"What is {n} + 9?") for n in range(8)]
        running = [asyncio.create_task(served.engine.generate(each, sampling)) for each in asked]
        while served.engine.health().running < len(asked):
            await asyncio.sleep(0.02)
        assert await policy.stream(served.engine, other.items()) == [None, None]
        assert not any(task.done() for task in running), "it came while they were sampled"
        return [await task for task in running]

    done = served.run(test())
    assert {(one.version, len(one.token_ids)) for one in done} == {(START, 200)}
    follows(served, tmp_path / "other", NEXT)


def broken(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        if name == BETWEEN:
            raise RuntimeError("a rank is gone")
        yield name, tensor


@pytest.mark.parametrize("how", ["damaged", "broken", "dropped", "unknown"])
def test_what_fails_midway_is_named_serves_nothing_and_leaves_nothing(
    how: str, served: Served, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next weights come by the same way, or from the object store where a broadcast broke off."""
    other, honest = moved(served, tmp_path / "other"), manifest.manifest

    def lying(version: Version, tensors: Any) -> Manifest:
        made = honest(version, tensors)
        records = {
            n: dataclasses.replace(r, checksum=r.checksum ^ (n == BETWEEN))
            for n, r in made.tensors.items()
        }
        return dataclasses.replace(made, tensors=records)

    async def test() -> None:
        assert await policy.stream(served.engine, served.start.items(), START) == [None, None]
        if how == "damaged":
            monkeypatch.setattr(manifest, "manifest", lying)
        given = {
            "broken": broken(other),
            "dropped": dropped(other).items(),
            "unknown": unknown_between(other).items(),
        }
        _, failed = await policy.stream(served.engine, given.get(how, other.items()))
        monkeypatch.setattr(manifest, "manifest", honest)
        wanted = {
            "damaged": f"{BETWEEN}: corrupt",
            "broken": "could not receive",
            "dropped": "up_proj",
            "unknown": "stray",
        }[how]
        assert isinstance(failed, BroadcastFailed if how == "broken" else WeightSyncError)
        assert wanted in str(failed)
        assert served.engine.health().version is None
        with pytest.raises(WorkerLost, match="no weights"):
            await served.engine.generate(prompt(served.folder, "What"), GREEDY)
        if how == "broken":
            await served.load(other, NEXT)
        else:
            assert await policy.stream(served.engine, other.items()) == [None, None]

    served.run(test())
    follows(served, tmp_path / "other", NEXT)


@pytest.mark.parametrize("phase", ["meeting", "first bucket", "middle", "last bucket", "end"])
def test_a_worker_that_is_killed_ends_its_engine_and_the_others_have_the_copy(
    phase: str, tiny_text: Path
) -> None:
    before = engine_workers(psutil.Process())
    served, policy = (
        Served("vllm", tiny_text, extra=ENGINES["vllm"]["extra"] | {"max_model_len": 512}),
        Policy(others=1),
    )
    (worker,) = [one for one in engine_workers(psutil.Process()) if one not in before]

    async def go() -> list[Any]:
        ends = await policy.stream(served.engine, served.start.items(), START)
        assert ends[:2] == [None, None]
        buckets = policy.buckets_sent - 1
        at = {"first bucket": 0, "middle": buckets // 2, "last bucket": buckets - 1, "end": buckets}

        def kill(number: int, last: bool) -> None:
            if number == at.get(phase):
                os.kill(worker.pid, signal.SIGKILL)

        policy.before = kill
        if phase == "meeting":
            policy.failures += 1  # a new group
            worker.kill()
        return await policy.stream(served.engine, served.start.items())

    began = time.monotonic()
    try:
        sent, lost, other = served.run(go())
        assert time.monotonic() - began < 3 * TIMEOUT
        assert isinstance(lost, WorkerLost)
        if phase == "end":
            assert sent is None or isinstance(sent, BroadcastFailed)
        else:
            assert isinstance(sent, BroadcastFailed)
            assert isinstance(other, BroadcastFailed)
        update = policy.sender.sent()
        assert (
            policy.receivers[1].deserialize(update.manifest, update.source).keys()
            == served.start.keys()
        )
    finally:
        served.close()
