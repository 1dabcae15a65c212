"""One judge of two replicas for all tests that leave it as they found it, with a scripted model
behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.judges import ModelStub, Served, model_stub, served
from tests.support.models import digits_model as digits_model


def arguments(model: ModelStub, **changes: Any) -> dict[str, Any]:
    """Two replicas in front of the model stub."""
    backend = {"kind": "openai", "url": model.url, "model": "stub", "timeout": 20.0, "connect": 2.0}
    return {
        "backend": backend,
        "replicas": {"min": 2, "max": 2, "cpus": 0.1},
        "canary": {"every": 5.0},
        **changes,
    }


@pytest.fixture(scope="session")
def model() -> Iterator[ModelStub]:
    with model_stub() as stub:
        yield stub


@pytest.fixture(scope="session")
def judge(model: ModelStub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("judge")
    limits = {"items": 16, "bytes": 65_536, "seconds": 15.0}
    with served(folder, arguments(model, limits=limits)) as made:
        made.ready(2)
        yield made
