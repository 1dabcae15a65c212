"""``bench publish``: weights from one actor into the tensors of another, over each transport, beside a plain copy.

The plain copy is the same bytes returned by the one actor (Ray puts them into its store) and copied into tensors by the other.
A transport does the same and describes and checks every tensor (CRC-32 on both sides).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from benchmarks.measure import machine
from rayloop.core.protocols import BroadcastGroup, Manifest
from rayloop.core.types import Version
from rayloop.launch.ray_variables import private_cluster
from rayloop.transports.settings import TransportSettings

DEADLINE = 600.0
TRANSPORTS = ("object_store", "filesystem", "collective")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=512, help="of weights")
    parser.add_argument("--tensors", type=int, default=64, help="that they consist of")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; the first one is left out")
    parser.add_argument("--transports", nargs="*", choices=TRANSPORTS, default=TRANSPORTS)
    parser.set_defaults(run=_publish)


class _End:
    """The tensors of one side, in bfloat16, and its transport."""

    def __init__(self, mib: int, count: int, settings: TransportSettings, folder: str) -> None:
        import torch

        from rayloop.transports.choose import transport

        torch.manual_seed(0)
        size = mib * 2**20 // count // 2
        self.tensors = {f"tensor.{n}": torch.randn(size).bfloat16() for n in range(count)}
        self.transport: Any = transport(settings, folder)


class Sender(_End):
    def plain(self) -> dict[str, npt.NDArray[np.uint8]]:
        from rayloop.transports.manifest import raw

        return {name: raw(tensor) for name, tensor in self.tensors.items()}

    def pack(self, step: int) -> tuple[Manifest, Any]:
        return self.transport.pack(Version(1, step), self.tensors)

    def invite(self) -> BroadcastGroup:
        return self.transport.invite("127.0.0.1", (0,), 0)

    def send(self, manifest: Manifest, source: Any, meeting: BroadcastGroup) -> None:
        self.transport.send(manifest, source, meeting)


class Receiver(_End):
    def copy(self, arrays: Mapping[str, npt.NDArray[np.uint8]]) -> None:
        import torch

        for name, tensor in self.tensors.items():
            tensor.view(torch.uint8).copy_(torch.from_numpy(arrays[name]))

    def take(self, manifest: Manifest, source: Any) -> None:
        for name, tensor in self.transport.unpack(manifest, source).items():
            self.tensors[name].copy_(tensor)


def _publish(arguments: argparse.Namespace) -> int:
    found: dict[str, list[float]] = {name: [] for name in ("plain", *arguments.transports)}
    with private_cluster() as temporary, tempfile.TemporaryDirectory() as folder:
        import ray  # reads the environment

        from cluster.roles.session import start

        start(temporary, store=(4 * arguments.mib + 256) * 2**20)
        ways = {name: _way(name, arguments, folder) for name in arguments.transports}
        plain = _plain(*_ends("object_store", arguments, folder))
        for number in range(arguments.rounds + 1):
            for name, way in (("plain", plain), *ways.items()):
                began = time.perf_counter()
                way(number)
                found[name].append(time.perf_counter() - began)
            print({name: round(seconds[-1], 3) for name, seconds in found.items()}, file=sys.stderr, flush=True)
        ray.shutdown()
    seconds = {name: median(each[1:]) for name, each in found.items()}
    print(json.dumps({
        "mib": arguments.mib,
        "tensors": arguments.tensors,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "gb_per_s": {name: round(arguments.mib * 2**20 / 1e9 / value, 3) for name, value in seconds.items()},
        "ratio": {name: round(seconds[name] / seconds["plain"], 3) for name in arguments.transports},
        "machine": machine(),
    }))  # fmt: skip
    return 0


def _ends(kind: str, arguments: argparse.Namespace, folder: str) -> tuple[Any, Any]:
    import ray

    settings: TransportSettings = TypeAdapter(TransportSettings).validate_python({"kind": kind})
    where = str(Path(folder) / kind)
    sender, receiver = (
        ray.remote(num_cpus=0)(end).remote(arguments.mib, arguments.tensors, settings, where)
        for end in (Sender, Receiver)
    )
    return sender, receiver


def _plain(sender: Any, receiver: Any) -> Callable[[int], None]:
    import ray

    def way(number: int) -> None:
        ray.get(receiver.copy.remote(sender.plain.remote()), timeout=DEADLINE)

    return way


def _way(kind: str, arguments: argparse.Namespace, folder: str) -> Callable[[int], None]:
    """One publication, as cluster/loop/publication.py does it."""
    import ray

    sender, receiver = _ends(kind, arguments, folder)

    def way(number: int) -> None:
        manifest, source = sender.pack.options(num_returns=2).remote(number)
        if kind == "collective":
            meeting = sender.invite.remote()
            sent = sender.send.remote(manifest, source, meeting)
            ray.get([sent, receiver.take.remote(manifest, meeting)], timeout=DEADLINE)
        else:
            ray.get(receiver.take.remote(manifest, source), timeout=DEADLINE)

    return way
