"""Adapters alone, which vLLM's workers receive themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rayloop.core.types import Version
from rayloop.engines.models.saving import save_model
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.engines.training_settings import ADAPTERS
from rayloop.transports.settings import CollectiveTransport
from tests.contracts.test_engine import GREEDY, agree, looks, questions
from tests.engines.test_adapters_in_vllm import Adapted, bytes_of, served, trainer
from tests.engines.test_streamed_weights import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["served", "trainer"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveTransport, "bucket_bytes", 4096)


def test_the_stream_has_the_adapters_alone_and_the_answers_are_the_trainers(
    served: Adapted, trainer: FsdpEngine, tmp_path: Path
) -> None:
    """Of new adapters, which change nothing, and of others twice."""
    policy, sent = Policy(), list[tuple[str, int]]()
    send_bucket = policy.send_bucket

    def noted(records: Mapping[str, Any] | None = None, bucket: Tensor | None = None) -> None:
        sent.extend((name, record.nbytes) for name, record in (records or {}).items())
        send_bucket(*(() if records is None else (records, bucket)))

    policy.send_bucket = noted  # type: ignore[assignment]
    requests = [
        *questions(served.folder)[:6],
        *(looks(served.folder) if "vlm" in str(served.folder) else []),
    ]
    for step in range(3):
        version, whole = Version(0, step), trainer.export(Version(0, step))
        save_model(str(served.folder), tmp_path / str(step), whole)
        sent.clear()
        assert served.run(
            policy.stream(served.engine, trainer.stream(version, adapters=True), version)
        ) == [None, None]
        assert policy.buckets_sent > 3, "buckets"
        assert {name.rpartition(".lora_")[1] for name, _ in sent} == {".lora_"}
        assert 5 * sum(nbytes for _, nbytes in sent) < bytes_of(whole)
        done = agree(served, tmp_path / str(step), requests, GREEDY)
        assert {one.version for one in done} == {version}
        trainer.restore_parameters()
        trainer._seed += 1
        trainer.perturb(ADAPTERS)
