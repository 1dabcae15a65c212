"""What every weight transport owes, with real actors: each engine gets each version bit for bit, or
the fault has a name.

Also for a transport of your own: add it to ``TRANSPORTS`` (docs/bring_your_own/transport.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.config.settings import check_components
from rayloop.core.failures import ConfigError, WeightSyncError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.run.config import RunConfig, read
from rayloop.transports.seam import WeightTransport, WeightUpdate, transport
from tests.support.clusters import private_ray
from tests.support.pages import write_snippets
from tests.support.runs import settings
from tests.support.weight_sync import Engine, Stage, weights

pytestmark = pytest.mark.timeout(300)

TRANSPORTS: dict[str, dict[str, Any]] = {
    "object_store": {"kind": "object_store"},
    "collective": {"kind": "collective"},
    "page": {"use": "shared_folder.py:SharedFolder"},
}
"""What stands in the configuration under ``weight_sync.transport``; ``page`` is that of
docs/bring_your_own/transport.md.
"""


@pytest.fixture(params=list(TRANSPORTS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    params=[
        "object_store",
        *(pytest.param(name, marks=pytest.mark.slow_faults) for name in list(TRANSPORTS)[1:]),
    ]
)
def played(request: pytest.FixtureRequest) -> str:
    """One that real actors play: each costs 25 seconds of CPU, so ``make test`` has one of them."""
    return str(request.param)


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    with private_ray(4):
        yield


def chosen(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "page":
        return {
            "use": (
                f"{write_snippets('bring_your_own/transport.md', folder)}/{TRANSPORTS[kind]['use']}"
            )
        }
    return TRANSPORTS[kind]


def stage(kind: str, folder: Path) -> Stage:
    return Stage(folder, 2, chosen(kind, folder), timeout=25.0)


@pytest.mark.usefixtures("_cluster")
def test_every_engine_has_every_version_and_one_that_comes_later_the_current_one(
    played: str, tmp_path: Path
) -> None:
    """An engine that dies while it takes a version does not keep the others from it."""
    on = stage(played, tmp_path)

    async def play() -> None:
        await on.sync_weights(1)
        await on.sync_weights(2)
        assert await on.seen() == [[1, 2], [1, 2]]
        await on.pool.workers[2].handle.die_in_the_next_load.remote("deserialize")
        await on.sync_weights(3)
        [lost] = on.named("worker_lost")
        assert lost["worker"] == 2
        await on.back()
        assert await on.seen() == [[1, 2, 3], [3]]
        await on.sync_weights(4)
        assert await on.seen() == [[1, 2, 3, 4], [3, 4]]

    on.run(play)


@pytest.mark.usefixtures("_cluster")
def test_bytes_that_are_not_the_manifest_s_are_named_and_no_engine_loads_them(
    played: str, tmp_path: Path
) -> None:
    on = stage(played, tmp_path)

    async def play() -> None:
        await on.sync_weights(1)
        await on.policy.ranks[0].lie.remote("layer.3")
        with pytest.raises(
            WeightSyncError,
            match=r"version 0\.2: 1 tensors did not arrive as sent: layer\.3: corrupt",
        ):
            await on.sync_weights(2)
        assert await on.seen() == [[1], [1]]
        assert not on.named("broadcast_failed"), "another way would bring the same"
        await on.policy.ranks[0].lie.remote("")
        await on.sync_weights(3)
        assert await on.seen() == [[1, 3], [1, 3]]

    on.run(play)


def halves(kind: str, folder: Path) -> tuple[WeightUpdate[Any], Any]:
    """A packed version, and a receiver, in this process."""
    config = RunConfig.model_validate(settings(folder, folder))
    weight_sync = type(config.weight_sync).model_validate({"transport": chosen(kind, folder)})
    made = transport(weight_sync.transport, folder)
    return made.sender("127.0.0.1").serialize(
        Version(0, 1), weights(Version(0, 1))
    ), made.receiver()


def test_the_engine_goes_on_whatever_happens(kind: str, tmp_path: Path) -> None:
    """It is paused while it loads, and resumed when that fails."""
    packed, receiver = halves(kind, tmp_path)

    class Refusing(Engine):
        async def load(self, manifest: Manifest, tensors: Any) -> None:
            await super().load(manifest, tensors)
            raise WeightSyncError("of another model")

    async def take(engine: Any) -> None:
        await receiver.take(engine, packed.manifest, packed.source)

    good, bad = Engine(), Refusing()
    asyncio.run(take(good))
    assert not good.paused
    with pytest.raises(WeightSyncError, match="of another model"):
        asyncio.run(take(bad))
    assert not bad.paused
    assert [loaded.version for loaded, _ in bad.loaded] == [Version(0, 1)]


def test_the_page_s_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(write_snippets("bring_your_own/transport.md", tmp_path)))
    written = yaml.safe_load((tmp_path / "transport.yaml").read_text(encoding="utf-8"))
    config = RunConfig.model_validate(settings(tmp_path, tmp_path, **written))
    check_components(config)
    assert isinstance(transport(config.weight_sync.transport, tmp_path), WeightTransport)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"kind": "objct_store"},
            (
                r"weight_sync\.transport\.kind: got 'objct_store', expected one of object_store,"
                r" .*did you mean"
            ),
        ),
        ({"kind": "collective", "bakkend": 1}, r"weight_sync\.transport\.bakkend: unknown key"),
        (
            {"use": "pathlib:Path"},
            r"weight_sync\.transport: use: 'pathlib:Path' has no nested Settings class",
        ),
        (
            {"use": "rayloop.envs.single_turn:SingleTurn"},
            "has no method sender and no receiver and no deliver",
        ),
        (
            {"use": "x:y", "wit": {}},
            r"weight_sync\.transport\.wit: unknown key; did you mean `with`",
        ),
    ],
)
def test_a_wrong_choice_is_named(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(settings(tmp_path, tmp_path, weight_sync={"transport": wrong})),
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=message):
        read(path, [])
