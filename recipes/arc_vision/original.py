"""The box parsers and tool payments of Arc Vision's published reward functions.

They come from jbarnes850/verl at b2577e0, for the original variants. Both parsers guess. Each
search is linear in the text, which a policy wrote.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Box

_LIST = r"([\d.\s,-]+)"
_INTEGERS = r"([\d\s,-]+)"
_NOTATIONS = tuple(
    re.compile(notation, re.IGNORECASE | re.MULTILINE)
    for notation in (
        rf"<bbox>\s*\[{_LIST}\]\s*</bbox>",
        rf"(?:\A|\s)\[{_LIST}\](?:\s|\Z)",
        rf'"bbox":\s*\[{_INTEGERS}\]',
        rf'"bbox_2d":\s*\[{_INTEGERS}\]',
        rf"bbox:\s*\[{_LIST}\]",
        rf"coordinates[:\s]+\[{_LIST}\]",
        rf"box:\s*\[{_LIST}\]",
        rf"bounding box:\s*\[{_LIST}\]",
        rf"<click>{_INTEGERS}</click>",
        rf"<point>{_INTEGERS}</point>",
        rf"<box>{_LIST}</box>",
        rf"^(?>.*?(?:detect|found|located)).*?\[{_LIST}\]",
        rf"^(?>.*?x1)(?>.*?y1)(?>.*?x2)(?>.*?y2).*?(?<![\s:=])[\s:=]*{_LIST}",
    )
)
"""Tried in this order; only the first match of each counts."""
_BOX_LIKE = re.compile(r"^(?>.*?<bbox>).*?</bbox>|\[[\d.\s,-]+\]", re.IGNORECASE | re.MULTILINE)
_SCREEN_SIZES = (
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
    """Whether the training function takes the text for an answer.

    Any bracketed list of numbers is one.
    """
    return _BOX_LIKE.search(text) is not None


def trained_box(text: str) -> Box | None:
    """The box of the training function: the first of 13 notations with four numbers.

    Corners are put in order, pixels divided by the first usual screen that holds them, and all
    clamped to 0..1.
    """
    for notation in _NOTATIONS:
        match = notation.search(text)
        numbers = _numbers(match[1]) if match else ()
        if len(numbers) == 4:
            return _fractions(*numbers)
    return None


def _numbers(text: str) -> tuple[float, ...]:
    """The numbers of a list separated by commas; empty when a part is not a number."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        return ()


def _fractions(x1: float, y1: float, x2: float, y2: float) -> Box:
    left, right = sorted((x1, x2))
    top, bottom = sorted((y1, y2))
    width, height = (1, 1) if max(right, bottom) <= 1 else _screen(right, bottom)
    return (
        _clamped(left / width),
        _clamped(top / height),
        _clamped(right / width),
        _clamped(bottom / height),
    )


def _screen(right: float, bottom: float) -> tuple[int, int]:
    """The first usual screen that holds the point; the first of all when none does."""
    for width, height in _SCREEN_SIZES:
        if right <= width and bottom <= height:
            return width, height
    return _SCREEN_SIZES[0]


def _clamped(value: float) -> float:
    return max(0.0, min(1.0, value))


def library_box(text: str) -> Box | None:
    """The library's box: the first match of a notation that is four fractions in order."""
    for notation in _LIBRARY:
        match = notation.search(text)
        if match is None:
            continue
        x1, y1, x2, y2 = map(float, match.groups())
        if x1 < x2 <= 1 and y1 < y2 <= 1:
            return x1, y1, x2, y2
    return None


def library_small(truth: Box, limit: float) -> bool:
    """Whether the library takes the true box for a small one.

    It computes in single precision, and the area is positive when both corners are swapped.
    """
    left, top, right, bottom = np.array(truth, np.float32)
    return bool((right - left) * (bottom - top) < np.float32(limit))


def true_box(values: object, where: str) -> Box:
    """Any four numbers, since the originals also score boxes without area. Raises DataFailure."""
    try:
        x1, y1, x2, y2 = map(float, values)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise DataFailure(where, f"bbox must be four numbers, not {values!r}") from error
    return x1, y1, x2, y2


MAX_WAIT_S = 5.0
"""Seconds that an episode may wait."""
_LARGEST_ZOOM = 4.0
_INSPECTED = {
    "structure": (0.1, "Detected nested container with 3 child elements"),
    "properties": (0.15, "Element type: button, state: enabled, z-index: 1000"),
    "accessibility": (0.12, "Role: button, label: 'Submit Form', tabindex: 0"),
}
_UNKNOWN = "Error: Function '{}' not available. Use 'database_query' function instead."
"""The original engine's answer to a tool that it does not have."""


class Simulated:
    """An episode's tools: fixed texts, and step rewards that the original only logged.

    ``gain`` is the total of the zooms (the original's ``calc_reward``).
    """

    def __init__(self) -> None:
        self.gain = 0.0
        self._waited = 0.0
        self._calls: dict[str, int] = {}

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, float]:
        """The result's text and the step reward.

        Raises TypeError and ValueError for arguments of another kind.
        """
        tools = {
            "zoom_ui_element": self._zoom,
            "wait_for_ui": self._wait,
            "inspect_element": self._inspect,
        }
        if name not in tools:
            return _UNKNOWN.format(name), 0.0
        return tools[name](arguments)

    def _count(self, name: str) -> int:
        self._calls[name] = self._calls.get(name, 0) + 1
        return self._calls[name]

    def _zoom(self, arguments: Mapping[str, Any]) -> tuple[str, float]:
        factor = min(arguments.get("zoom_factor", 2.0), _LARGEST_ZOOM)
        sides = arguments.get("region", [0.25, 0.25, 0.75, 0.75])
        # Integer bounds keep an integer side one, as the text shows it.
        region = [max(0, min(1, side)) for side in sides]
        x1, y1, x2, y2 = region
        count = self._count("zoom")
        gain = 0.2 * factor * (1 - (x2 - x1) * (y2 - y1)) * 0.8 ** (count - 1)
        self.gain += gain
        text = f"Zoomed into region {region} with factor {factor:.1f}. Confidence gain: {gain:.2f}"
        if gain > 0.1:
            return text, gain
        return text, -0.2 if count > 2 else -0.05

    def _wait(self, arguments: Mapping[str, Any]) -> tuple[str, float]:
        seconds = min(arguments.get("duration", 1.0), MAX_WAIT_S - self._waited)
        if seconds <= 0:
            return f"Maximum wait time ({MAX_WAIT_S}s) exceeded", -0.2
        self._waited += seconds
        count = self._count("wait")
        gain = 0.15 * 0.7 ** (count - 1)
        reward = gain if gain > 0.05 and count <= 2 else -0.1
        return f"Waited {seconds:.1f}s for UI to stabilize", reward

    def _inspect(self, arguments: Mapping[str, Any]) -> tuple[str, float]:
        kind = arguments.get("type", "structure")
        first_gain, text = _INSPECTED.get(kind, (0.05, "Unknown inspection type"))
        gain = first_gain * 0.8 ** (self._count("inspect") - 1)
        return f"Inspection result: {text}", gain if gain > 0.08 else -0.05


def step_rewards(calls: Iterable[str]) -> float:
    """The sum of the step rewards of the calls that are JSON with a name and arguments."""
    tools = Simulated()
    total = 0.0
    for text in calls:
        try:
            call = json.loads(text)
            _, reward = tools.call(call["name"], call.get("arguments", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            continue
        total += reward
    return total
