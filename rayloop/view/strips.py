"""Groups of episodes as film strips: a row for each member, a column for each turn, and on its
picture what the turn did there.
"""

import base64
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rayloop.core.failures import ConfigError, RayloopError
from rayloop.core.files import content
from rayloop.core.types import ImageSource
from rayloop.data.images import MOST_BYTES, decode, probe, untinted
from rayloop.envs.grammar.actions import Action, Mistake, Point
from rayloop.envs.grammar.arpo import Broken, ScreenSize, acts
from rayloop.envs.grammar.scanner import read
from rayloop.envs.grammar.screens import Pointing
from rayloop.envs.tools import ToolError, tool_call
from rayloop.run.folder import RESTARTS, RunFolder
from rayloop.view.completions import MARKUP
from rayloop.view.reader import Record, box_reader

MAX_SIDE = 1280
"""Pixels; larger images are shrunk for the page. The originals stay where the run keeps them."""
MAX_PIXELS = 100_000_000
"""Images beyond this are named instead of shown."""
LONGEST = 20_000
"""Characters of a text that the page holds."""
SHADES = (-0.25, -1.0, -2.0, -4.0)
"""A token is shaded one degree more for each of these log-probs that it falls below."""


def _embedded(path: Path, tint: float) -> Record:
    try:
        data, width, height = probe(ImageSource(str(path)), MAX_PIXELS)
    except RayloopError as error:
        return {"why": str(error)}
    return {
        "width": width,
        "height": height,
        "uri": "data:image/webp;base64," + base64.b64encode(shrunk(data, tint)).decode(),
    }


def shrunk(data: bytes, tint: float) -> bytes:
    """The image as WebP, without its tint, and no side longer than ``MAX_SIDE``."""
    image, file = decode(data), io.BytesIO()
    image = untinted(image, tint) if tint else image
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    image.save(file, "WEBP", quality=90)
    return file.getvalue()


class Films:
    """Makes the page's groups from ``rollouts``.

    ``images``: sha256 -> ``{name, width, height, uri}``, or ``{why}`` without one.
    """

    def __init__(
        self, folder: RunFolder, picture: Callable[[Path, float], Record] = _embedded
    ) -> None:
        """``picture``: width, height and ``uri``, or ``why``, of a file with that tint; the default
        puts the image into the page. Raises ConfigError when ``report.boxes`` cannot be loaded.
        """
        self._picture, self._root = picture, folder.path.resolve()
        config = folder.configuration
        self._reader = box_reader(config)
        self.tint = float((config.get("model") or {}).get("position_tint") or 0.0)
        environment = config.get("environment") or {}
        components = [
            (environment.get("episode") or {}).get("environment"),
            *(environment.get("kinds") or {}).values(),
        ]
        settings = [(component or {}).get("with") or {} for component in components]
        self._screen = next(
            (found for found in settings if {"pointing", "variant"} & found.keys()), {}
        )
        self.images: dict[str, Record] = {}

    def group(self, members: Sequence[Record], folder: Path) -> Record:
        """A group; the files of its images lie below ``folder``."""
        first, rewards = (
            members[0],
            [member["reward"] for member in members if member["reward"] is not None],
        )
        truth, statuses = first.get("truth"), (member["status"] for member in members)
        rows = [self._row(member, folder) for member in members]
        names: list[dict[str, str]] = [{} for _ in range(max(len(row["cells"]) for row in rows))]
        for row in rows:
            for cell, known in zip(row["cells"], names, strict=False):
                cell["letter"] = (
                    known.setdefault(cell["state"], chr(ord("A") + len(known) % 26))
                    if cell["state"]
                    else ""
                )
        return {
            **{key: first[key] for key in ("step", "group", "task", "source")},
            "prompt": cut(first["prompt"]),
            "truth": "" if truth is None else cut(json.dumps(truth, ensure_ascii=False)),
            "true": [] if self._reader is None or truth is None else self._reader.true(truth),
            "images": self._add(first["images"], folder),
            "verdicts": list(
                dict.fromkeys([*statuses, *("replayed" for m in members if m["replayed"])])
            ),
            "mean": fmean(rewards) if rewards else None,
            "std": stdev(rewards) if len(rewards) > 1 else None,
            "turns": len(names),
            "parts": next(
                (turn for turn, known in enumerate(names) if turn and len(known) > 1), None
            ),
            "moving": any(cell["on"] or cell["images"] for row in rows for cell in row["cells"]),
            "members": rows,
        }

    def _row(self, member: Record, folder: Path) -> Record:
        """The record with its cells, and the boxes of its answer (fractions of the group's first
        image).
        """
        answers = [turn["text"] for turn in member["turns"] if turn["sampled"]]
        boxes = self._reader.answered(answers[-1]) if self._reader and answers else []
        kept = {
            key: value
            for key, value in member.items()
            if key not in ("prompt", "truth", "turns", "images")
        }
        return {**kept, "boxes": boxes, "cells": self._cells(member, folder)}

    def _cells(self, member: Record, folder: Path) -> list[Record]:
        """One for each sampled turn, with what was observed before it; one more for what came after
        the last.
        """
        seen = self._add(member["images"], folder)
        states, gaps, advantages = (
            iter(member.get(name, ())) for name in ("states", "gaps", "advantages")
        )
        cells, said, shown = list[Record](), list[str](), list[str]()
        for turn in member["turns"]:
            shown += self._add(turn["images"], folder)
            if not turn["sampled"]:
                said.append(
                    turn["text"]
                    if turn["text"] == RESTARTS
                    else MARKUP.sub("", turn["text"]).strip()
                )
                continue
            seen += shown
            on, marks = self._marks(turn["text"], seen)
            of_turn = {"gap": next(gaps, None), "advantage": next(advantages, None)}
            cells.append({**_cell(said, shown, next(states, ""), turn, on, marks), **of_turn})
            said, shown = [], []
        return [*cells, _cell(said, shown, "")] if said or shown or not cells else cells

    def _marks(self, text: str, seen: Sequence[str]) -> tuple[str, list[Record]]:
        """The image on which a turn acts, and what it does there, in pixels of that image; "" when
        it acts on none.
        """
        index, box = _boxed(text)
        sha = seen[index] if -len(seen) <= index < len(seen) else ""
        image = self.images.get(sha, {"why": ""})
        if "why" in image:
            return "", []
        size = image["width"], image["height"]
        if box:
            x1, y1, x2, y2 = (
                value * side if max(box) <= 1 else value
                for value, side in zip(box, size * 2, strict=True)
            )
            return sha, [{"kind": "box", "label": "box", "at": (x1, y1, x2 - x1, y2 - y1)}]
        marks = [mark for action in _actions(text, self._screen, *size) if (mark := _mark(action))]
        return (sha, marks) if marks else ("", [])

    def _foreign(self, path: Path, sha256: str) -> str:
        """Why a picture outside of the run's folder is not shown: a folder that a stranger made may
        name any, but knows no hash of it. Empty when it is shown.
        """
        if path.resolve().is_relative_to(self._root):
            return ""
        try:
            same = hashlib.sha256(content(path, MOST_BYTES)).hexdigest() == sha256
        except (OSError, ValueError) as error:
            return f"{path}: {error}"
        return "" if same else f"{path} is not the picture that the run showed"

    def _add(self, entries: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
        """Their hashes, in order."""
        for entry in entries:
            if entry["sha256"] not in self.images:
                path, tint = (
                    (folder / entry["file"], self.tint)
                    if "file" in entry
                    else (Path(entry["path"]), 0.0)
                )
                found = (
                    {"why": why}
                    if (why := self._foreign(path, entry["sha256"]))
                    else self._picture(path, tint)
                )
                self.images[entry["sha256"]] = {"name": f"i{len(self.images)}", **found}
        return [entry["sha256"] for entry in entries]


def cut(text: str) -> str:
    """At most ``LONGEST`` characters of it."""
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]}\n({more} more characters: see the record)"


def _cell(
    said: Sequence[str],
    images: Sequence[str],
    state: str,
    turn: Mapping[str, Any] | None = None,
    on: str = "",
    marks: Sequence[Record] = (),
) -> Record:
    """``text``: None for what came after the last turn."""
    cell: Record = {
        "said": cut("\n".join(said)),
        "images": images,
        "state": state,
        "text": None,
        "on": on,
        "marks": marks,
    }
    if turn is not None:
        kept, text = (
            {key: turn[key] for key in ("executed", "reward") if key in turn},
            cut(turn["text"]),
        )
        cell |= {**kept, "text": text, "runs": _runs(text, turn.get("logprobs", ()))}
    return cell


def _runs(text: str, logprobs: Sequence[Sequence[float]]) -> list[Record]:
    """The text in runs of tokens with the same shade, 0 to 4; ``least``: the smallest log-prob in
    it, None where unknown.
    """
    found, start = list[Record](), 0
    for stop, logprob in logprobs:
        end = min(int(stop), len(text))
        shade = sum(logprob < bound for bound in SHADES)
        if found and (found[-1]["shade"] == shade or start == end):
            found[-1] |= {
                "text": found[-1]["text"] + text[start:end],
                "least": min(found[-1]["least"], logprob),
            }
        else:
            found.append({"text": text[start:end], "shade": shade, "least": logprob})
        start = end
    return (
        [*found, {"text": text[start:], "shade": 0, "least": None}] if start < len(text) else found
    )


def _actions(text: str, screen: Mapping[str, Any], width: int, height: int) -> Sequence[Action]:
    """What a turn does on a screen, points in its pixels; nothing for a text that is no turn."""
    try:
        pointing = Pointing.model_validate(screen.get("pointing") or {})
        if screen.get("variant") == "original":
            return [
                action
                for call in acts(text, ScreenSize(pointing.size(width, height), (width, height)))
                for action in call
            ]
        turn = read(text)
        return (
            ()
            if isinstance(turn, Mistake)
            else [pointing.on(action, width, height) for action in turn.actions]
        )
    except (Broken, ConfigError, ValueError, OverflowError):
        return ()


def _mark(action: Action) -> Record | None:
    """Where it is, or from where to where; None for what has no place."""
    values = [getattr(action, field.name) for field in fields(action)]
    points = [value for value in values if isinstance(value, Point)]
    label = " ".join(
        [type(action).__name__.lower(), *(str(value) for value in values if isinstance(value, str))]
    )
    kind = "drag" if len(points) > 1 else "click"
    return (
        {"kind": kind, "label": label, "at": [c for p in points for c in (p.x, p.y)]}
        if points
        else None
    )


def _boxed(text: str) -> tuple[int, list[float] | None]:
    """Of a call of a tool that looks at an image: which one (-1: the newest), and the box, in
    fractions or pixels.
    """
    try:
        _name, arguments = tool_call(text) or ("", {})
    except ToolError:
        return -1, None
    box = arguments.get("box", arguments.get("bbox_2d"))
    fits = (
        isinstance(box, list)
        and len(box) == 4
        and all(type(v) in (int, float) and -math.inf < v < math.inf for v in box)
    )
    index = arguments.get("image", 0)
    return (index, box) if fits and type(index) is int else (-1, None)
