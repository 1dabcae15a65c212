"""Tracebacks as the person who wrote a reward or an environment wants to see them."""

from __future__ import annotations

import re
import traceback

PLUMBING = (
    "rayloop/config/settings.py", "rayloop/rewards/functions.py", "rayloop/rewards/outcomes.py", "rayloop/core/threads.py",
    "rayloop/core/owner_thread.py", "rayloop/envs/episode.py", "rayloop/envs/instance.py", "rayloop/envs/worker.py",
    "actors/reward.py", "cluster/stages/trial.py",
)  # fmt: skip
"""Files whose frames stand above a person's own code in a traceback, and say nothing about it."""
_FRAMES = re.compile(rf'^  File "[^"]*({"|".join(map(re.escape, PLUMBING))})".*\n(    .*\n)*', re.MULTILINE)


def own_frames(error: BaseException) -> str:
    """The traceback without the frames of what called a person's code, and without what was being handled meanwhile."""
    return _FRAMES.sub("", "".join(traceback.format_exception(error, chain=False)).rstrip())
