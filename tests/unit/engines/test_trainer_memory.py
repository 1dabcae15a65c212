"""Memory of a trainer on a GPU that needs none to be decided: what is computed again, and how
blocks grow.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import ray

from rayloop.actors.policy import PolicyRank, RankSettings
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.grpo.losses.settings import PpoLoss
from rayloop.transports.settings import ObjectStoreTransport, TransportSettings

Open = Callable[[TransportSettings], None]
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("said", "gpu", "cpu"), [(None, True, False), (False, False, False), (True, True, True)]
)
def test_activations_are_computed_again_on_a_gpu_unless_somebody_says_otherwise(
    said: bool | None, gpu: bool, cpu: bool
) -> None:
    settings = FsdpSettings(gradient_checkpointing=said)
    assert (settings.recomputes(on_gpu=True), settings.recomputes(on_gpu=False)) == (gpu, cpu)


@pytest.fixture(autouse=True)
def _no_allocator_settings() -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in NAMES}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Has a rank open the place where the ranks meet, which is where it imports torch: a stand-in
    here.
    """
    sharding = types.ModuleType("rayloop.engines.training.sharding")
    sharding.__dict__["meeting_place"] = lambda *_, **__: SimpleNamespace(port=1)
    monkeypatch.setitem(sys.modules, sharding.__name__, sharding)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    def open_place(transport: TransportSettings) -> None:
        settings = RankSettings(
            ModelSettings(path="model"),
            FsdpSettings(),
            OptimizerSettings(),
            PpoLoss(),
            transport,
            "folder",
            0,
        )
        meeting = PolicyRank(settings, 0, 2).address()
        assert meeting is not None
        assert (meeting.host, meeting.port) == ("127.0.0.1", 1)

    return open_place


def test_a_rank_s_blocks_grow_before_torch_is_there(opens: Open) -> None:
    opens(ObjectStoreTransport())
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_environment_says_of_the_allocator_counts(opens: Open, name: str) -> None:
    os.environ[name] = "max_split_size_mb:128"
    opens(ObjectStoreTransport())
    assert {key: os.environ.get(key) for key in NAMES} == dict.fromkeys(NAMES) | {
        name: "max_split_size_mb:128"
    }
