"""Checks that weights and the optimizer's state are finite before they are saved or sent."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayloop.engines.training.sharding import local
from rayloop.transports.manifest import has_nan


@torch.no_grad()
def not_finite(state: Mapping[str, Any], device: torch.device) -> str:
    """Return which tensors, of mappings of mappings, hold NaN or an infinity on any rank.

    Empty for none. Collective: all ranks have the same names.
    """
    tensors = dict(_flat(state))
    # One flag for each tensor travels in one collective, and the host waits for the device once.
    flags = torch.stack([has_nan(local(tensor)).to(device) for tensor in tensors.values()])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    defects = [name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag]
    if not defects:
        return ""
    return f"NaN or an infinity in {len(defects)} of {len(tensors)} tensors, first {defects[0]}"


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
