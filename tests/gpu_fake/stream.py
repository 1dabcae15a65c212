"""``python -m tests.gpu_fake.stream``: what a broadcast of weights moves, from tensors on a device
that is not there, as JSON.

The sender is the product's. Replaced: CUDA, the process group, which notes what it is given, and
numbers read from the device.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.gpu_fake import device

device.load()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  # it asks CUDA's own functions when it is imported
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402

from rayloop.core.types import Version  # noqa: E402
from rayloop.transports import manifest  # noqa: E402
from rayloop.transports.collective import BroadcastGroup, BroadcastSender  # noqa: E402
from rayloop.transports.settings import NcclTransport  # noqa: E402
from tests.gpu_fake.watch import Watch  # noqa: E402

LAYERS, SHAPES = 40, [(1024, 1024), (4096, 1024), (1024, 4096), (1024,)]
LIMIT = 64 << 20


class Group:
    """A membership; ``moved``: bytes broadcast, by device."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.moved = Counter[str]()

    def join(self, *meeting: Any) -> None: ...

    def leave(self) -> None:
        raise AssertionError("it failed")

    def broadcast(self, buffer: torch.Tensor) -> None:
        self.moved[buffer.device.type] += buffer.nbytes


class Counting(Watch):
    """Counts the bytes that are copied from device to device."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func._opname in ("copy_", "_to_copy"):
            there, here = args[:2] if func._opname == "copy_" else (out, args[0])
            beside = (
                "" if func._opname == "_to_copy" or not (len(args) > 2 and args[2]) else ", beside"
            )
            self.copied[f"{here.device.type} to {there.device.type}{beside}"] += there.nbytes
        return out


def main() -> None:
    watch = Counting()
    device.pretend(watch.attend)
    manifest._checksums = lambda tensors: [0 for _ in tensors]  # numbers that nobody has computed
    manifest.raw = lambda tensor: tensor
    NcclTransport.bucket_bytes = LIMIT
    with unset_fake_temporarily():
        sender = BroadcastSender(NcclTransport(), "127.0.0.1")
    group = sender._membership = Group()  # type: ignore[assignment]
    total = 0

    def gathered() -> Any:
        nonlocal total
        for layer in range(LAYERS):
            for number, shape in enumerate(SHAPES):
                tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
                total += tensor.nbytes
                yield f"{layer}.{number}", tensor
                del tensor

    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        sender.send(Version(0, 1), gathered(), BroadcastGroup("127.0.0.1", 1, "all", 2, 60.0))
        copies = sender.sent().source
    watch.close()
    print(
        json.dumps(
            {
                "weights": total,
                "limit": LIMIT,
                "peak": watch.peak,
                "copied": watch.copied,
                "broadcast": group.moved,
                "host": sum(copy.nbytes for copy in copies.values()),
                "waits": watch.waits,  # type: ignore[union-attr]
            }
        )
    )


if __name__ == "__main__":
    main()
