"""torch's profiler, of all threads of this process."""

from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

_running: list[Any] = []


def profile(path: str | None) -> None:
    """Begin a profile, in place of a running one; with ``path``, end the running one.

    It is then written to ``path`` as a Chrome trace (``.json.gz``).
    """
    running = _running.pop() if _running else None
    if running is not None:
        running.stop()
    if path is None:
        profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities(),
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        _running.append(profiler)
        profiler.start()
    elif running is not None:
        running.export_chrome_trace(path)
