"""``bench weight_sync``: weights from one actor into the tensors of another, over each transport,
beside a plain copy.

The plain copy is the same bytes returned by the one actor (Ray puts them into its store) and copied
into tensors by the other. A transport does the same and describes and checks every tensor
(checksums on both sides).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from benchmarks.measure import machine
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.launch.ray_variables import private_cluster
from rayloop.transports.seam import WeightUpdate, transport
from rayloop.transports.settings import TransportSettings

DEADLINE_S = 600.0
TRANSPORTS = ("object_store", "collective")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=512, help="of weights")
    parser.add_argument("--tensors", type=int, default=64, help="that they consist of")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="how often each is measured; the first one is left out",
    )
    parser.add_argument(
        "--transports",
        nargs="*",
        choices=TRANSPORTS,
        default=TRANSPORTS,
        help="those to compare (all)",
    )
    parser.set_defaults(run=_weight_sync)


class _End:
    """The tensors of one side, in bfloat16."""

    def __init__(self, mib: int, count: int, settings: TransportSettings, folder: str) -> None:
        import torch

        torch.manual_seed(0)
        size = mib * 2**20 // count // 2
        self.tensors = {f"tensor.{n}": torch.randn(size).bfloat16() for n in range(count)}
        self.transport = transport(settings, folder)


class Sending(_End):
    """In place of the policy's first rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sender, self.copied = self.transport.sender("127.0.0.1"), False

    def plain(self) -> dict[str, npt.NDArray[np.uint8]]:
        from rayloop.transports.manifest import raw

        return {name: raw(tensor) for name, tensor in self.tensors.items()}

    def send(self, version: Version, meeting: Any) -> None:
        self.sender.send(version, self.tensors.items(), meeting)
        self.copied = True

    def export(self, version: Version) -> tuple[Manifest, Any]:
        update = self.sender.sent() if self.copied else self.sender.serialize(version, self.tensors)
        return update.manifest, update.source

    def invite(self, engines: tuple[int, ...], failures: int, timeout: float) -> Any:
        return self.sender.invite(engines, failures, timeout)


class Receiving(_End):
    """In place of a rollout actor."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.receiver = self.transport.receiver()

    def copy(self, arrays: Mapping[str, npt.NDArray[np.uint8]]) -> None:
        import torch

        for name, tensor in self.tensors.items():
            tensor.view(torch.uint8).copy_(torch.from_numpy(arrays[name]))

    def load(self, manifest: Manifest, source: Any) -> None:
        for name, tensor in self.receiver.deserialize(manifest, source).items():
            self.tensors[name].copy_(tensor)


@dataclass(frozen=True)
class _Pair:
    """One sender and one receiver: the policy and the engines as a transport sees them
    (``rayloop.transports.seam``).
    """

    sending: Any
    receiving: Any
    members = (0,)
    patience = 600.0
    kept: list[WeightUpdate[Any]] = field(default_factory=list)

    async def send(self, version: Version, meeting: Any) -> None:
        await self.sending.send.remote(version, meeting)

    async def export(self, version: Version) -> WeightUpdate[Any]:
        manifest, source = self.sending.export.options(num_returns=2).remote(version)
        return WeightUpdate(await manifest, source)

    async def invite(self, engines: tuple[int, ...], failures: int, timeout: float) -> Any:
        return await self.sending.invite.remote(engines, failures, timeout)

    def keep(self, update: WeightUpdate[Any]) -> None:
        self.kept[:] = [update]

    async def copied(self) -> None:
        """The object store's copy is there."""
        if isinstance(self.kept[0].source, asyncio.Task):
            await self.kept[0].source

    async def load(self, update: WeightUpdate[Any]) -> None:
        await self.receiving.load.remote(update.manifest, update.source)

    def fell_back(self, version: Version, error: Exception) -> None:
        raise error


def _weight_sync(arguments: argparse.Namespace) -> int:
    found: dict[str, list[float]] = {name: [] for name in ("plain", *arguments.transports)}
    with private_cluster() as temporary, tempfile.TemporaryDirectory() as folder:
        import ray  # reads the environment

        from rayloop.cluster.session import start

        start(temporary, store=(4 * arguments.mib + 256) * 2**20)
        ways = {name: _way(name, arguments, folder) for name in arguments.transports}
        plain = _plain(_ends("object_store", arguments, folder))
        for number in range(arguments.rounds + 1):
            for name, way in (("plain", plain), *ways.items()):
                began = time.perf_counter()
                way(number)
                found[name].append(time.perf_counter() - began)
            print(
                {name: round(seconds[-1], 3) for name, seconds in found.items()},
                file=sys.stderr,
                flush=True,
            )
        ray.shutdown()
    seconds = {name: median(each[1:]) for name, each in found.items()}
    print(
        json.dumps(
            {
                "mib": arguments.mib,
                "tensors": arguments.tensors,
                "seconds": {name: round(value, 4) for name, value in seconds.items()},
                "gb_per_s": {
                    name: round(arguments.mib * 2**20 / 1e9 / value, 3)
                    for name, value in seconds.items()
                },
                "ratio": {
                    name: round(seconds[name] / seconds["plain"], 3)
                    for name in arguments.transports
                },
                "machine": machine(),
            }
        )
    )
    return 0


def _settings(kind: str) -> TransportSettings:
    chosen: TransportSettings = TypeAdapter(TransportSettings).validate_python({"kind": kind})
    return chosen


def _ends(kind: str, arguments: argparse.Namespace, folder: str) -> _Pair:
    import ray

    where = str(Path(folder) / kind)
    given = (arguments.mib, arguments.tensors, _settings(kind), where)
    return _Pair(*(ray.remote(num_cpus=0)(end).remote(*given) for end in (Sending, Receiving)))


def _plain(ends: _Pair) -> Callable[[int], None]:
    import ray

    def way(number: int) -> None:
        ray.get(ends.receiving.copy.remote(ends.sending.plain.remote()), timeout=DEADLINE_S)

    return way


def _way(kind: str, arguments: argparse.Namespace, folder: str) -> Callable[[int], None]:
    """One weight update, as a run does it."""
    ends = _ends(kind, arguments, folder)
    chosen = transport(_settings(kind), str(Path(folder) / kind))

    runner = asyncio.Runner()

    async def update(version: Version) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await chosen.deliver(ends, ends, version)
            await ends.copied()

    def way(number: int) -> None:
        runner.run(update(Version(1, number)))

    return way
