"""What a recipe measures a checkpoint on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Rows that no training of the recipe saw. ``controls``: also wrong images and the best answers without one; ``samples``:
    sampled answers per row besides the greedy one."""

    path: str
    controls: bool = False
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``config`` is the run whose reader, prompt, sampling and reward are used; ``sets``: held-out rows by name; ``score``:
    the component to quote. Paths are relative to the current directory, as everywhere. ``missing``: how rows that are not there
    are made."""

    config: str
    sets: Mapping[str, HeldOut]
    score: str
    missing: str = ""
