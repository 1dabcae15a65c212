"""Runs inside SGLang's processes: receives a broadcast of weights there."""

import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rayloop.core.failures import BroadcastFailed, WeightSyncError
from rayloop.transports.collective import BroadcastReceiver

LOADER, FORGET = f"{__name__}.take", f"{__name__}.forget"
"""By these names SGLang finds its custom weight loaders."""
_RECEIVERS: list[BroadcastReceiver] = []
"""That of this process, from its first broadcast on."""


def take(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Receive the broadcast that ``SglangEngine.receive`` describes in the only tensor; verify and
    load its weights, bucket by bucket. The fault, or the names, go into a file: SGLang drops what a
    custom loader returns, and ends when it raises.
    """
    [(_, packed)] = named_tensors
    version, broadcast, folder = pickle.loads(packed.cpu().numpy().tobytes())
    settings, meeting = pickle.loads(broadcast)
    # The group lives as long as the process, so that later syncs need not meet again.
    if not _RECEIVERS:
        _RECEIVERS.append(BroadcastReceiver(settings))
    weights, names = _RECEIVERS[0].stream(version, meeting), list[str]()

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            names.append(name)
            yield name, tensor

    found: Exception | list[str] = names
    try:
        try:
            model.load_weights(noted())
        finally:
            deque(weights, maxlen=0)  # the other members of the group go on
            forget()
    except (WeightSyncError, BroadcastFailed) as error:
        found = error
    except Exception as error:
        found = WeightSyncError(f"version {version}: SGLang did not take the weights: {error!r}")
    (Path(folder) / str(os.getpid())).write_bytes(pickle.dumps(found))


def forget(model: Any = None, named_tensors: Sequence[tuple[str, Tensor]] = ()) -> None:
    """Empty this process's cache of what the vision tower made of images: SGLang keeps it over a
    sync of weights, by the images' hashes, and would answer with features of the old weights.
    """
    from sglang.srt.managers.mm_schedule import embedding_cache

    if embedding_cache is not None:
        embedding_cache.clear()
