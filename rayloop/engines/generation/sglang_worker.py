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

LOADER = f"{__name__}.take"
"""Name by which SGLang finds the custom weight loader that receives a broadcast."""
FORGET = f"{__name__}.forget"
"""Name by which SGLang finds the custom weight loader that empties the cache of images."""
_RECEIVERS: list[BroadcastReceiver] = []
"""Receiver of this process, from its first broadcast on."""


def take(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Receive the broadcast that ``SglangEngine.receive`` describes in the only tensor.

    Its weights are verified and loaded bucket by bucket. The fault, or the names, go into a file:
    SGLang drops the result of a custom loader, and ends when it raises.
    """
    [(_, packed)] = named_tensors
    version, broadcast, folder = pickle.loads(packed.cpu().numpy().tobytes())
    settings, meeting = pickle.loads(broadcast)
    # The group ends with the process, so that later syncs need not meet again.
    if not _RECEIVERS:
        _RECEIVERS.append(BroadcastReceiver(settings))
    weights = _RECEIVERS[0].stream(version, meeting)
    names: list[str] = []

    def recording() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            names.append(name)
            yield name, tensor

    result: Exception | list[str] = names
    try:
        try:
            model.load_weights(recording())
        finally:
            # The rest is received as well: the other members of the group continue.
            deque(weights, maxlen=0)
            forget()
    except (WeightSyncError, BroadcastFailed) as error:
        result = error
    except Exception as error:
        result = WeightSyncError(f"version {version}: SGLang did not take the weights: {error!r}")
    (Path(folder) / str(os.getpid())).write_bytes(pickle.dumps(result))


def forget(model: Any = None, named_tensors: Sequence[tuple[str, Tensor]] = ()) -> None:
    """Empty this process's cache of image features.

    SGLang keeps it over a sync of weights, by the images' hashes, and would answer with features of
    the old weights.
    """
    from sglang.srt.managers.mm_schedule import embedding_cache

    if embedding_cache is not None:
        embedding_cache.clear()
