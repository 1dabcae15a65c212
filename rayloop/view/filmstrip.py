"""Groups of episodes as film strips: a row for each member, a column for each turn.

Each turn has the picture that it acted on, with marks of its actions.
"""

import base64
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rayloop.core.failures import ConfigError, RayloopError
from rayloop.core.files import content
from rayloop.core.types import ImageSource
from rayloop.data.images import MOST_BYTES, decode, probe, untinted
from rayloop.envs.grammar.actions import Action, Mistake
from rayloop.envs.grammar.screens import ScreenSettings
from rayloop.envs.tools import ToolError, tool_call
from rayloop.run.folder import RunFolder
from rayloop.run.records.rollouts import NEW_CONTEXT
from rayloop.view.completions import MARKUP
from rayloop.view.reader import Record, box_reader
from rayloop.view.screen_turns import actions_of, mark

MAX_SIDE_PIXELS = 1280
"""Pixels of a side; larger images are shrunk for the page.

The originals stay where the run keeps them.
"""
MAX_PIXELS = 100_000_000
"""Larger images are named instead of shown."""
MAX_TEXT_CHARACTERS = 20_000
"""The most characters of a text on the page."""
SHADE_LOGPROBS = (-0.25, -1.0, -2.0, -4.0)
"""A token is shaded one degree more for each of these log-probs that it falls below."""


def _embedded(path: Path, tint: float) -> Record:
    try:
        data, width, height = probe(ImageSource(str(path)), MAX_PIXELS)
    except RayloopError as error:
        return {"why": str(error)}
    encoded = base64.b64encode(shrunk(data, tint)).decode()
    return {"width": width, "height": height, "uri": f"data:image/webp;base64,{encoded}"}


def shrunk(data: bytes, tint: float) -> bytes:
    """The image as WebP, without its tint, and no side longer than ``MAX_SIDE_PIXELS``."""
    image = decode(data)
    if tint:
        image = untinted(image, tint)
    image.thumbnail((MAX_SIDE_PIXELS, MAX_SIDE_PIXELS))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=90)
    return file.getvalue()


SCREEN_KEYS = {"language", "pointing", "variant"}
"""Settings of environments with a screen, by which they are known."""


def _screen_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the run's screen environment; empty when it has none."""
    environment = config.get("environment") or {}
    episode = environment.get("episode") or {}
    kinds = environment.get("kinds") or {}
    for component in (episode.get("environment"), *kinds.values()):
        settings: Mapping[str, Any] = (component or {}).get("with") or {}
        if SCREEN_KEYS & settings.keys():
            return settings
    return {}


class Filmstrips:
    """Makes the page's groups from ``rollouts``.

    ``images``: sha256 -> ``{name, width, height, uri}``, or ``{why}`` without one.
    """

    def __init__(
        self, folder: RunFolder, picture: Callable[[Path, float], Record] = _embedded
    ) -> None:
        """``picture`` returns width, height and ``uri``, or ``why``, of a file with that tint.

        The default puts the image into the page. Raises ConfigError when ``report.boxes`` cannot be
        loaded.
        """
        self._picture = picture
        self._root = folder.path.resolve()
        config = folder.configuration
        self._reader = box_reader(config)
        self.tint = float((config.get("model") or {}).get("position_tint") or 0.0)
        self._screen = _screen_settings(config)
        self.images: dict[str, Record] = {}

    def group(self, members: Sequence[Record], folder: Path) -> Record:
        """A group; the files of its images are below ``folder``."""
        first = members[0]
        truth = first.get("truth")
        rewards = [member["reward"] for member in members if member["reward"] is not None]
        verdicts = [member["status"] for member in members]
        if any(member["replayed"] for member in members):
            verdicts.append("replayed")
        rows = [self._row(member, folder) for member in members]
        letters = _add_letters(rows)
        branching = (turn for turn, states in enumerate(letters) if turn and len(states) > 1)
        return {
            **{key: first[key] for key in ("step", "group", "task", "source")},
            "prompt": cut(first["prompt"]),
            "truth": "" if truth is None else cut(json.dumps(truth, ensure_ascii=False)),
            "true": [] if self._reader is None or truth is None else self._reader.true(truth),
            "images": self._add(first["images"], folder),
            "verdicts": list(dict.fromkeys(verdicts)),
            "mean": fmean(rewards) if rewards else None,
            "std": stdev(rewards) if len(rewards) > 1 else None,
            "turns": len(letters),
            "parts": next(branching, None),
            "moving": any(_has_picture(row) for row in rows),
            "members": rows,
        }

    def _row(self, member: Record, folder: Path) -> Record:
        """The record with its cells, and the boxes of its answer.

        Boxes are fractions of the group's first image.
        """
        answers = [turn["text"] for turn in member["turns"] if turn["sampled"]]
        boxes = self._reader.answered(answers[-1]) if self._reader and answers else []
        record = {
            key: value
            for key, value in member.items()
            if key not in ("prompt", "truth", "turns", "images")
        }
        return {**record, "boxes": boxes, "cells": self._cells(member, folder)}

    def _cells(self, member: Record, folder: Path) -> list[Record]:
        """A cell for each sampled turn, with the observations before it.

        One more cell has the observations after the last turn.
        """
        images = self._add(member["images"], folder)
        states = iter(member.get("states", ()))
        gaps = iter(member.get("gaps", ()))
        sight = iter(member.get("sight", ()))
        advantages = iter(member.get("advantages", ()))
        cells: list[Record] = []
        texts: list[str] = []
        new_images: list[str] = []
        for turn in member["turns"]:
            new_images += self._add(turn["images"], folder)
            text = turn["text"]
            if not turn["sampled"]:
                texts.append(text if text == NEW_CONTEXT else MARKUP.sub("", text).strip())
                continue
            images += new_images
            acted_on, marks = self._marks(text, images)
            cell = _cell(texts, new_images, next(states, ""), turn, acted_on, marks)
            cell["gap"] = next(gaps, None)
            cell["sight"] = next(sight, None)
            cell["advantage"] = next(advantages, None)
            cells.append(cell)
            texts = []
            new_images = []
        if texts or new_images or not cells:
            cells.append(_cell(texts, new_images, ""))
        return cells

    def _marks(self, text: str, shas: Sequence[str]) -> tuple[str, list[Record]]:
        """The image that a turn acts on, and the marks of its actions, in pixels of that image.

        The image is "" when the turn acts on none.
        """
        index, box = _boxed(text)
        sha = shas[index] if -len(shas) <= index < len(shas) else ""
        image = self.images.get(sha, {"why": ""})
        if "why" in image:
            return "", []
        width = image["width"]
        height = image["height"]
        if box:
            x1, y1, x2, y2 = box
            if max(box) <= 1:
                x1 *= width
                y1 *= height
                x2 *= width
                y2 *= height
            return sha, [{"kind": "box", "label": "box", "at": (x1, y1, x2 - x1, y2 - y1)}]
        actions = _actions(text, self._screen, width, height)
        marks = [found for found in map(mark, actions) if found is not None]
        return (sha, marks) if marks else ("", [])

    def _reason_hidden(self, path: Path, sha256: str) -> str:
        """The reason why a picture outside of the run's folder is not shown; empty when it is.

        A folder that a stranger made may name any file, but the stranger does not know its hash.
        """
        if path.resolve().is_relative_to(self._root):
            return ""
        try:
            same = hashlib.sha256(content(path, MOST_BYTES)).hexdigest() == sha256
        except (OSError, ValueError) as error:
            return f"{path}: {error}"
        return "" if same else f"{path} is not the picture that the run showed"

    def _add(self, entries: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
        """Add the images, and return their hashes in order."""
        for entry in entries:
            sha256 = entry["sha256"]
            if sha256 not in self.images:
                name = f"i{len(self.images)}"
                self.images[sha256] = {"name": name, **self._loaded(entry, folder)}
        return [entry["sha256"] for entry in entries]

    def _loaded(self, entry: Mapping[str, Any], folder: Path) -> Record:
        """The picture of an entry, or ``why`` it is not shown."""
        path = folder / entry["file"] if "file" in entry else Path(entry["path"])
        reason = self._reason_hidden(path, entry["sha256"])
        if reason:
            return {"why": reason}
        # Only the run's own files have its tint.
        return self._picture(path, self.tint if "file" in entry else 0.0)


def _add_letters(rows: Sequence[Record]) -> list[dict[str, str]]:
    """Give equal states of a turn the same letter; returns state -> letter of each turn."""
    turns = max(len(row["cells"]) for row in rows)
    letters: list[dict[str, str]] = [{} for _ in range(turns)]
    for row in rows:
        for cell, letter_of in zip(row["cells"], letters, strict=False):
            state = cell["state"]
            if state:
                letter_of.setdefault(state, chr(ord("A") + len(letter_of) % 26))
            cell["letter"] = letter_of.get(state, "")
    return letters


def _has_picture(row: Record) -> bool:
    return any(cell["on"] or cell["images"] for cell in row["cells"])


def cut(text: str) -> str:
    """At most ``MAX_TEXT_CHARACTERS`` of a text."""
    more = len(text) - MAX_TEXT_CHARACTERS
    if more <= 0:
        return text
    return f"{text[:MAX_TEXT_CHARACTERS]}\n({more} more characters: see the record)"


def _cell(
    texts: Sequence[str],
    images: Sequence[str],
    state: str,
    turn: Mapping[str, Any] | None = None,
    acted_on: str = "",
    marks: Sequence[Record] = (),
) -> Record:
    """A cell of the strip; its ``text`` is None for observations after the last turn."""
    cell: Record = {
        "said": cut("\n".join(texts)),
        "images": images,
        "state": state,
        "text": None,
        "on": acted_on,
        "marks": marks,
    }
    if turn is not None:
        cell |= {key: turn[key] for key in ("executed", "reward") if key in turn}
        cell["text"] = cut(turn["text"])
        cell["runs"] = _runs(cell["text"], turn.get("logprobs", ()))
    return cell


def _runs(text: str, logprobs: Sequence[Sequence[float]]) -> list[Record]:
    """The text in runs of tokens with the same shade, 0 to 4.

    ``least``: the smallest log-prob of a run, None where unknown.
    """
    runs: list[Record] = []
    start = 0
    for stop, logprob in logprobs:
        end = min(int(stop), len(text))
        shade = sum(logprob < bound for bound in SHADE_LOGPROBS)
        if runs and (runs[-1]["shade"] == shade or start == end):
            runs[-1]["text"] += text[start:end]
            runs[-1]["least"] = min(runs[-1]["least"], logprob)
        else:
            runs.append({"text": text[start:end], "shade": shade, "least": logprob})
        start = end
    if start < len(text):
        runs.append({"text": text[start:], "shade": 0, "least": None})
    return runs


def _actions(text: str, screen: Mapping[str, Any], width: int, height: int) -> Sequence[Action]:
    """The actions of a turn on a screen, points in its pixels; empty for a text that has none."""
    known = {key: screen[key] for key in SCREEN_KEYS & screen.keys()}
    try:
        actions = actions_of(text, ScreenSettings.model_validate(known), (width, height))
    except (ConfigError, ValueError, OverflowError):
        return ()
    return () if isinstance(actions, Mistake) else actions


def _boxed(text: str) -> tuple[int, list[float] | None]:
    """The image and the box, in fractions or pixels, of a call of a tool that looks at an image.

    The image is an index; -1 is the newest. The box is None for any other text.
    """
    try:
        _name, arguments = tool_call(text) or ("", {})
    except ToolError:
        return -1, None
    box = arguments.get("box", arguments.get("bbox_2d"))
    index = arguments.get("image", 0)
    if type(index) is not int or not isinstance(box, list) or len(box) != 4:
        return -1, None
    return (index, box) if all(map(_is_finite, box)) else (-1, None)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and -math.inf < value < math.inf
