"""The pay of Arc Vision's tools for a call. Its tools showed nothing, and their rewards were only logged, never trained on.

Numbers from jbarnes850/verl at b2577e0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

WAITING = 5.0
"""Seconds of waiting in an episode that are enough."""
_INSPECTED = {"structure": 0.10, "properties": 0.15, "accessibility": 0.12}
_CENTRE = (0.25, 0.25, 0.75, 0.75)


class Simulated:
    """An episode's tools. ``gain`` is the sum that zooming earned (the tool's own ``calc_reward``)."""

    def __init__(self) -> None:
        self.gain = self._waited = 0.0
        self._calls: dict[str, int] = {}

    def call(self, name: str, arguments: Mapping[str, Any]) -> float:
        """The step reward of a call; 0 for an unknown tool. Raises TypeError and ValueError for arguments of another
        kind."""
        known = {"zoom_ui_element": self._zoom, "wait_for_ui": self._wait, "inspect_element": self._inspect}
        if name not in known:
            return 0.0
        self._calls[name] = count = self._calls.get(name, 0) + 1
        return known[name](arguments, count)

    def _zoom(self, arguments: Mapping[str, Any], count: int) -> float:
        x1, y1, x2, y2 = (min(max(float(v), 0.0), 1.0) for v in arguments.get("region", _CENTRE))
        factor = min(max(float(arguments.get("zoom_factor", 2.0)), 1.0), 4.0)
        gain = 0.2 * factor * (1 - (x2 - x1) * (y2 - y1)) * 0.8 ** (count - 1)
        self.gain += gain
        return gain if gain > 0.1 else -0.2 if count > 2 else -0.05

    def _wait(self, arguments: Mapping[str, Any], count: int) -> float:
        enough = self._waited >= WAITING
        self._waited += min(max(float(arguments.get("duration", 1.0)), 0.1), WAITING)
        gain = 0.15 * 0.7 ** (count - 1)
        return -0.2 if enough else gain if gain > 0.05 and count <= 2 else -0.1

    def _inspect(self, arguments: Mapping[str, Any], count: int) -> float:
        gain = _INSPECTED.get(str(arguments.get("type", "structure")), 0.05) * 0.8 ** (count - 1)
        return gain if gain > 0.08 else -0.05


def step_rewards(calls: list[str]) -> float:
    """The sum over the calls that are JSON with a name and arguments."""
    tools, paid = Simulated(), 0.0
    for call in calls:
        try:
            said = json.loads(call)
            paid += tools.call(said["name"], said.get("arguments", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return paid
