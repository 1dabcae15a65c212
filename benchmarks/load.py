"""What ``bench scale`` simulates: numbers alone, so that naming them imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """What is simulated.

    ``latency``: mean seconds of an episode; ``train``: seconds of a step of the trainer.
    """

    engines: int
    slots: int
    group: int
    groups: int
    staleness: int
    steps: int
    latency: float
    train: float
    uniform: float
    """Share of the groups whose members all earn the same: the filter removes them."""
