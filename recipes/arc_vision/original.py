"""The box parsers and tool payments of Arc Vision's own reward functions (jbarnes850/verl at
b2577e0), for the original variants. Both parsers guess. Each search is linear in the text, which a
policy wrote.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Box

_LIST, _WHOLE = r"([\d.\s,-]+)", r"([\d\s,-]+)"
_NOTATIONS = tuple(
    re.compile(notation, re.IGNORECASE | re.MULTILINE)
    for notation in (
        rf"<bbox>\s*\[{_LIST}\]\s*</bbox>",
        rf"(?:\A|\s)\[{_LIST}\](?:\s|\Z)",
        rf'"bbox":\s*\[{_WHOLE}\]',
        rf'"bbox_2d":\s*\[{_WHOLE}\]',
        rf"bbox:\s*\[{_LIST}\]",
        rf"coordinates[:\s]+\[{_LIST}\]",
        rf"box:\s*\[{_LIST}\]",
        rf"bounding box:\s*\[{_LIST}\]",
        rf"<click>{_WHOLE}</click>",
        rf"<point>{_WHOLE}</point>",
        rf"<box>{_LIST}</box>",
        rf"^(?>.*?(?:detect|found|located)).*?\[{_LIST}\]",
        rf"^(?>.*?x1)(?>.*?y1)(?>.*?x2)(?>.*?y2).*?(?<![\s:=])[\s:=]*{_LIST}",
    )
)
"""Tried in this order; only the first match of each counts."""
_BOX_LIKE = re.compile(r"^(?>.*?<bbox>).*?</bbox>|\[[\d.\s,-]+\]", re.IGNORECASE | re.MULTILINE)
_SCREENS = (
    (1920, 1080),
    (1280, 720),
    (2560, 1440),
    (3840, 2160),
    (1366, 768),
    (1440, 900),
    (1600, 900),
)

_FOUR = r"\[" + r",\s*".join([r"(\d+(?:\.\d*)?)"] * 4) + r"\]"
_LIBRARY = tuple(map(re.compile, (_FOUR, rf"bbox:\s*{_FOUR}", rf"<bbox>{_FOUR}</bbox>")))


def looks_like_box(text: str) -> bool:
    """Whether the training function takes the text for an answer: any bracketed list of numbers
    will do.
    """
    return _BOX_LIKE.search(text) is not None


def trained_box(text: str) -> Box | None:
    """The box of the training function: the first of 13 notations with four numbers.

    Corners are put in order, pixels divided by the first usual screen that holds them, and all
    clamped to 0..1.
    """
    for notation in _NOTATIONS:
        found = notation.search(text)
        numbers = _numbers(found[1]) if found else ()
        if len(numbers) == 4:
            return _fractions(*numbers)
    return None


def _numbers(text: str) -> tuple[float, ...]:
    """The numbers of a list separated by commas; empty when a part is no number."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        return ()


def _fractions(x1: float, y1: float, x2: float, y2: float) -> Box:
    left, right = sorted((x1, x2))
    top, bottom = sorted((y1, y2))
    width, height = 1, 1
    if max(right, bottom) > 1:
        width, height = next((s for s in _SCREENS if right <= s[0] and bottom <= s[1]), _SCREENS[0])
    x1, y1, x2, y2 = (
        max(0.0, min(1.0, v)) for v in (left / width, top / height, right / width, bottom / height)
    )
    return x1, y1, x2, y2


def library_box(text: str) -> Box | None:
    """The library's box: the first bracketed list of four fractions in order, in one of three
    places.
    """
    for notation in _LIBRARY:
        if found := notation.search(text):
            x1, y1, x2, y2 = map(float, found.groups())
            if x1 < x2 <= 1 and y1 < y2 <= 1:
                return x1, y1, x2, y2
    return None


def library_small(truth: Box, limit: float) -> bool:
    """In single precision, and of corners that are both the wrong way round the area is positive."""
    left, top, right, bottom = np.array(truth, np.float32)
    return bool((right - left) * (bottom - top) < np.float32(limit))


def true_box(values: object, where: str) -> Box:
    """Any four numbers: the originals score boxes without area, too. Raises DataFailure."""
    try:
        x1, y1, x2, y2 = map(float, values)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise DataFailure(where, f"bbox must be four numbers, not {values!r}") from error
    return x1, y1, x2, y2


WAITING = 5.0
"""Seconds that an episode may wait."""
_MOST_ZOOM = 4.0
_INSPECTED = {
    "structure": (0.1, "Detected nested container with 3 child elements"),
    "properties": (0.15, "Element type: button, state: enabled, z-index: 1000"),
    "accessibility": (0.12, "Role: button, label: 'Submit Form', tabindex: 0"),
}
_UNKNOWN = "Error: Function '{}' not available. Use 'database_query' function instead."
"""What its engine answers to a tool that it does not have, in these words."""


class Simulated:
    """An episode's tools: fixed texts, and step rewards that the original only logged.

    ``gain``: zooms' (its ``calc_reward``).
    """

    def __init__(self) -> None:
        self.gain = self._waited = 0.0
        self._calls: dict[str, int] = {}

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, float]:
        """The result's text and the step reward.

        Raises TypeError and ValueError for arguments of another kind.
        """
        known = {
            "zoom_ui_element": self._zoom,
            "wait_for_ui": self._wait,
            "inspect_element": self._inspect,
        }
        return known[name](arguments) if name in known else (_UNKNOWN.format(name), 0.0)

    def _count(self, name: str) -> int:
        self._calls[name] = self._calls.get(name, 0) + 1
        return self._calls[name]

    def _zoom(self, arguments: Mapping[str, Any]) -> tuple[str, float]:
        factor = min(arguments.get("zoom_factor", 2.0), _MOST_ZOOM)
        region = [
            max(0, min(1, side)) for side in arguments.get("region", [0.25, 0.25, 0.75, 0.75])
        ]
        x1, y1, x2, y2 = region
        count = self._count("zoom")
        gain = 0.2 * factor * (1 - (x2 - x1) * (y2 - y1)) * 0.8 ** (count - 1)
        self.gain += gain
        said = f"Zoomed into region {region} with factor {factor:.1f}. Confidence gain: {gain:.2f}"
        return said, gain if gain > 0.1 else -0.2 if count > 2 else -0.05

    def _wait(self, arguments: Mapping[str, Any]) -> tuple[str, float]:
        seconds = min(arguments.get("duration", 1.0), WAITING - self._waited)
        if seconds <= 0:
            return f"Maximum wait time ({WAITING}s) exceeded", -0.2
        self._waited += seconds
        count = self._count("wait")
        gain = 0.15 * 0.7 ** (count - 1)
        return (
            f"Waited {seconds:.1f}s for UI to stabilize",
            gain if gain > 0.05 and count <= 2 else -0.1,
        )

    def _inspect(self, arguments: Mapping[str, Any]) -> tuple[str, float]:
        found, said = _INSPECTED.get(
            arguments.get("type", "structure"), (0.05, "Unknown inspection type")
        )
        gain = found * 0.8 ** (self._count("inspect") - 1)
        return f"Inspection result: {said}", gain if gain > 0.08 else -0.05


def step_rewards(calls: list[str]) -> float:
    """The sum over the calls that are JSON with a name and arguments."""
    tools, paid = Simulated(), 0.0
    for call in calls:
        try:
            said = json.loads(call)
            paid += tools.call(said["name"], said.get("arguments", {}))[1]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            continue
    return paid
