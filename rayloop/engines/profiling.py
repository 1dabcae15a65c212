"""torch's profiler, of all threads of this process."""

from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

_running: list[Any] = []


def profile(path: str | None) -> None:
    """Begin a profile in place of an earlier one; with ``path``, end it and write it there as a
    Chrome trace (``.json.gz``).
    """
    ended = _running.pop() if _running else None
    if ended is not None:
        ended.stop()
    if path is None:
        config = _ExperimentalConfig(profile_all_threads=True)
        _running.append(
            torch.profiler.profile(
                activities=torch.profiler.supported_activities(), experimental_config=config
            )
        )
        _running[0].start()
    elif ended is not None:
        ended.export_chrome_trace(path)
