"""Whether weights and the optimizer's state are numbers: what is not is neither saved nor sent to
an engine.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayloop.engines.training.sharding import local
from rayloop.transports.manifest import has_nan


@torch.no_grad()
def not_finite(state: Mapping[str, Any], device: torch.device) -> str:
    """Which tensors, of mappings of mappings, hold NaN or an infinity on any rank; "" for none.

    Collective: all ranks have the same names.
    """
    tensors = dict(_flat(state))
    # One flag for each tensor travels in one collective, and the host waits for the device once.
    found = torch.stack([has_nan(local(tensor)).to(device) for tensor in tensors.values()])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    wrong = [name for name, bad in zip(tensors, found.tolist(), strict=True) if bad]
    return (
        f"NaN or an infinity in {len(wrong)} of {len(tensors)} tensors, first {wrong[0]}"
        if wrong
        else ""
    )


def _flat(state: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
