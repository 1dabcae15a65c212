"""The content of each page of the console, read from a run's folder.

Nothing here is markup: the templates are in ``pages``.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from rayloop.config.explain import defaults
from rayloop.config.yaml_source import flat
from rayloop.core.files import content, regular
from rayloop.data.images import FORMATS, MOST_BYTES, ORIENTATION_TAG
from rayloop.judge.calibrate import CALIBRATION
from rayloop.measure.report import verdict
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder, configuration
from rayloop.run.place import own_copy
from rayloop.serve_apps.console.judge_status import calibrated, judge_now
from rayloop.view.charts import charts, drawn, is_constant
from rayloop.view.filmstrip import MAX_PIXELS, Filmstrips, shrunk
from rayloop.view.formatting import describe
from rayloop.view.index import EpisodeIndex
from rayloop.view.page import ROUTINE, held_out, held_out_scores, ledger
from rayloop.view.progress import remaining
from rayloop.view.reader import Record, Tail, answers, by_step, evenly, gains, members
from rayloop.view.status import state, status

TABLE_ROWS = 50
"""Rows of a table; the rest is on further pages."""
_URGENT_EVENTS = ("alarm", "failed", "stalled")
"""Events that the overview shows first."""
_MAX_ALARMS = 3
_MAX_INCIDENTS = 10
_MAX_OVERVIEW_CHARTS = 6
_MAX_EVALUATIONS = 12
_ROUTINE_OF_TRAINING = ("trained", "checkpoint")
_JUDGE_EVENTS = ("unscored", "grader_error")
_MAX_START = 2**31
"""The last row with which a table can begin."""
_NEWEST_STEPS = 24
"""Newest steps that the overview shows one by one."""
_REFRESH_S = 10
"""Seconds after which the pages of a live run update how long ago something was."""
_INDEX_UPDATE_S = 0.1
_MAX_ORIGINAL_BYTES = 2**20
"""Bytes of a picture that is sent unchanged; a larger one is shrunk."""
_PICTURE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""The errors of PIL for a file that is not a picture."""
_FIRST_ROTATED_ORIENTATION = 5
"""EXIF orientations from this one exchange width and height."""
Query = Mapping[str, str]
"""The query of a page's address."""


class Absent(LookupError):
    """There is no such step, group, episode, answer, run or picture on record."""


class Console:
    """The pages of one run.

    Thread-safe; each page is made from what the folder holds at that moment.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Open the run's records.

        Raises ConfigError when ``report.boxes`` cannot be loaded, OSError and sqlite3.Error when
        the index cannot be stored.
        """
        self.folder = folder
        self.tint = Filmstrips(folder).tint
        self.metrics = Tail(folder.metrics)
        self.event_log = Tail(folder.events)
        self.index = EpisodeIndex(folder)
        self.roots = _picture_roots(folder)
        """Folders whose pictures are shown.

        All pictures of the run's own folder; of the folders of its data files only the ones that a
        page has shown.
        """
        self._shown_pictures = set[Path]()
        self._start_time = time.time()

    def stamp(self) -> str:
        """A text that changes whenever a page may have changed."""
        run = self.folder
        parts: list[Any] = [self._start_time]
        parts.append(int(time.time() / _REFRESH_S) if run.lock.holder() else None)
        for path in (
            run.metrics.path,
            run.events.path,
            run.config,
            run.rollouts.path,
            run.evaluations.path,
            self.index.path,
        ):
            with suppress(OSError):
                parts.append((path.name, path.stat().st_mtime_ns, path.stat().st_size))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def overview(self, query: Query) -> Record:
        """The state of the run: status, curves, ledger, time, actors, incidents."""
        metrics = self.metrics.records()
        events = self.event_log.records()
        newest_first = events[::-1]
        run_status = status(self.folder, time.time(), events)
        seconds_left = 0.0
        if run_status["process"]:
            seconds_left = remaining(metrics[-_NEWEST_STEPS:], run_status["steps"] or 0)
        incidents = [event for event in newest_first if event["event"] not in ROUTINE]
        alarms = [event for event in newest_first if event["event"] in _URGENT_EVENTS]
        controls = by_step(events, "controls")
        return {
            "state": state(run_status),
            "status": run_status,
            "left": seconds_left,
            **self.curves(query, _MAX_OVERVIEW_CHARTS),
            "ledger": ledger(run_status["end"], metrics),
            "newest": metrics[: -_NEWEST_STEPS - 1 : -1],
            "incidents": incidents[:_MAX_INCIDENTS],
            "alarms": alarms[:_MAX_ALARMS],
            "gains": gains(events),
            "verdict": verdict(controls[-1]) if controls else "",
        }

    def curves(self, query: Query, most: int | None = None) -> Record:
        """Every chart, or the first ones."""
        evaluations = by_step(self.event_log.records(), "evaluated")
        changing = [
            chart for chart in charts(self.metrics.records(), evaluations) if not is_constant(chart)
        ]
        return {"charts": [drawn(chart) for chart in changing[:most]]}

    def step(self, query: Query, step: int) -> Record:
        """A step: its groups, events and metrics. Raises Absent."""
        records = {record["step"]: record for record in self.metrics.records()}
        groups = members(self.folder, step)
        if step not in records and not groups:
            raise Absent(f"step {step} is not on record")
        events = [
            event
            for event in self.event_log.records()
            if event.get("step") == step and event["event"] != "trained"
        ]
        return {
            "step": step,
            "numbers": list(records),
            "record": records.get(step, {}),
            "groups": groups,
            "events": events,
        }

    def group(self, query: Query, step: int, number: int) -> Record:
        """A group as film strips. Raises Absent."""
        groups = members(self.folder, step)
        if number not in groups:
            raise Absent(
                f"no episode of group {number} of step {step} is on record (keep_rollouts)"
            )
        return {
            "step": step,
            "numbers": sorted(groups),
            **self._film(groups[number], self.folder.rollouts.path),
        }

    def episode(self, query: Query, step: int, number: int, sample: int) -> Record:
        """An episode as film strip, as the tree of its events, and as messages.

        Raises Absent.
        """
        group = members(self.folder, step).get(number, ())
        records = {record["sample"]: record for record in group}
        if sample not in records:
            raise Absent(
                f"episode {sample} of group {number} of step {step} is not on record"
                " (keep_rollouts)"
            )
        return {
            "step": step,
            "numbers": sorted(records),
            "record": records[sample],
            **self._film([records[sample]], self.folder.rollouts.path),
        }

    def _film(self, records: list[Record], folder: Path) -> Record:
        filmstrips = Filmstrips(self.folder, self._picture)
        return {"group": filmstrips.group(records, folder), "images": filmstrips.images}

    def rollouts(self, query: Query) -> Record:
        """Episodes, or groups, that fit the query.

        It has filters of the index, ``view``, ``order`` and ``start``.
        """
        self.index.update(seconds=_INDEX_UPDATE_S)
        groups = query.get("view") != "episodes"
        start = _start(query)
        total, rows = self.index.search(query, query.get("order", ""), groups, start, TABLE_ROWS)
        return {
            "asked": dict(query),
            "rows": rows,
            "groups": groups,
            "start": start,
            "total": total,
            **self.index.state(),
        }

    def evaluations(self, query: Query) -> Record:
        """Held-out scores, controls, and the tasks of two evaluations.

        The two are ``before`` and ``after``; their tasks are next to each other, largest loss
        first.
        """
        events = self.event_log.records()
        steps = list(self.folder.evaluations.files())
        start = _start(query)
        choice: dict[str, int] = {}
        if steps:
            choice = {
                "before": int(query.get("before") or steps[0]),
                "after": int(query.get("after") or steps[-1]),
            }
        pairs: list[tuple[Record, ...]] = []
        if steps and set(choice.values()) <= set(steps):
            pairs = answers(self.folder, *choice.values())
        pairs.sort(key=_gain)
        evaluations = by_step(events, "evaluated")
        newest_first = evenly(evaluations[::-1], _MAX_EVALUATIONS)
        return {
            "evaluations": newest_first[::-1],
            "held_out": held_out_scores(evaluations),
            "controls": by_step(events, "controls"),
            "steps_evaluated": steps,
            "asked": {name: str(step) for name, step in choice.items()},
            "rows": pairs[start : start + TABLE_ROWS],
            "start": start,
            "total": len(pairs),
        }

    def pair(self, query: Query, before: int, after: int) -> Record:
        """The answers of two evaluations to one ``task``. Raises Absent."""
        pairs = []
        if {before, after} <= self.folder.evaluations.files().keys():
            pairs = answers(self.folder, before, after)
        task = query.get("task")
        pair = next((pair for pair in pairs if pair[0]["task"] == task), None)
        if pair is None:
            raise Absent(
                f"no task of this name has an answer in both of the evaluations of steps {before}"
                f" and {after}"
            )
        return self._film([held_out(answer) for answer in pair], self.folder.evaluations.path)

    def configuration(self, query: Query) -> Record:
        """The configuration, first the keys that differ from the defaults.

        With ``other``, a run in the same folder or an earlier attempt of this run, only the keys
        that differ from the other's. Raises Absent.
        """
        other = query.get("other", "")
        others = _other_configurations(self.folder.path)
        if other and other not in others:
            raise Absent(
                f"{other} is neither a run in this folder nor an earlier attempt of this run"
            )

        values = flat_json(self.folder.configuration)
        if other:
            other_values = flat_json(configuration(others[other]))
            keys = sorted(values.keys() | other_values.keys())
            rows = [(key, values.get(key), other_values.get(key)) for key in keys]
            rows = [row for row in rows if not _is_equal(row)]
        else:
            default_values = flat_json(defaults(RunConfig, self.folder.configuration))
            rows = [(key, value, default_values.get(key)) for key, value in values.items()]
            rows.sort(key=_is_equal)
        return {"rows": rows, "others": list(others), "other": other}

    def events(self, query: Query) -> Record:
        """Events, the newest first: of one ``kind``, or all but the routine of training."""
        kind = query.get("kind", "")
        start = _start(query)
        records = self.event_log.records()
        if kind:
            rows = [event for event in records if event["event"] == kind]
        else:
            rows = [event for event in records if event["event"] not in _ROUTINE_OF_TRAINING]
        rows.reverse()
        return {
            "kinds": sorted({event["event"] for event in records}),
            "asked": {"kind": kind},
            "rows": rows[start : start + TABLE_ROWS],
            "start": start,
            "total": len(rows),
        }

    def judge(self, query: Query) -> Record:
        """The records about the judge.

        Its settings, verdicts of the newest recorded step, and the answers that it left without a
        reward.
        """
        newest = max(self.folder.rollouts.files(), default=0)
        source = (self.folder.configuration.get("reward") or {}).get("source") or {}
        # Starlette makes pages in threads, where no event loop runs.
        now = asyncio.run(judge_now(source.get("with") or {})) if self._is_own_run() else {}
        records: list[Record] = []
        for group in members(self.folder, newest).values():
            records += group
        events = [
            event for event in reversed(self.event_log.records()) if event["event"] in _JUDGE_EVENTS
        ]
        metrics = self.metrics.records()
        return {
            "source": source,
            "calibrated": calibrated(self.folder.path.with_name(CALIBRATION)),
            "now": now,
            "newest": newest,
            "records": records[:TABLE_ROWS],
            "scores": metrics[-1] if metrics else {},
            "events": events[:TABLE_ROWS],
        }

    def _is_own_run(self) -> bool:
        """Whether it is a live run of this user.

        The settings of any other run may name a judge, and a file of this user as its key.
        """
        return self.folder.lock.holder() is not None and own_copy(self.folder.cluster).exists()

    def _picture(self, path: Path, tint: float) -> Record:
        """The address and the size of a picture; ``why`` it has none otherwise.

        A file outside of the roots, and one that is not a picture, have no address.
        """
        try:
            path = path.resolve(strict=True)
            number = self._root_number(path)
            if number is None:
                return {"why": f"{path} is neither in the run's folder nor next to its data"}
            width, height, _ = _size_and_type(path)
        except _PICTURE_ERRORS as error:
            return {"why": f"{path}: {error}"}
        self._shown_pictures.add(path)
        name = quote(str(path.relative_to(self.roots[number])))
        return {"width": width, "height": height, "uri": f"/picture/{number}/{name}"}

    def _root_number(self, path: Path) -> int | None:
        for number, root in enumerate(self.roots):
            if path.is_relative_to(root):
                return number
        return None

    def picture(self, place: int, name: str) -> tuple[bytes, str]:
        """A picture below a root, without its tint, and its media type.

        Raises Absent for anything else.
        """
        is_in_run_folder = place == 0
        with suppress(*_PICTURE_ERRORS, IndexError):
            root = self.roots[place]
            path = (root / name).resolve(strict=True)
            may_be_shown = is_in_run_folder or path in self._shown_pictures
            if path.is_relative_to(root) and may_be_shown:
                _, _, media_type = _size_and_type(path)
                data = content(path, MOST_BYTES)
                tint = self.tint if is_in_run_folder else 0.0
                if tint or len(data) > _MAX_ORIGINAL_BYTES:
                    return shrunk(data, tint), "image/webp"
                return data, media_type
        raise Absent(f"{name} is not a picture of this run")


def _picture_roots(folder: RunFolder) -> list[Path]:
    """The run's folder, and the folders of its data files."""
    data = folder.configuration.get("data") or {}
    roots = [folder.path]
    for name in ("train", "eval"):
        if isinstance(data.get(name), str):
            roots.append(Path(data[name]).parent)
    return [root.resolve() for root in dict.fromkeys(roots)]


def _gain(pair: tuple[Record, ...]) -> float:
    """The reward of a pair's last answer minus that of its first; none counts as 0."""
    return (pair[-1]["reward"] or 0.0) - (pair[0]["reward"] or 0.0)


def _other_configurations(run: Path) -> dict[str, Path]:
    """The configurations of runs in the same folder and of earlier attempts, by name."""
    paths = {
        path.parent.name: path
        for path in sorted(run.parent.glob("*/config.yaml"))
        if path.parent != run
    }
    paths |= {path.name: path for path in sorted(run.glob("config.yaml.*"))}
    # A symbolic link may lead to any file.
    return {name: path for name, path in paths.items() if not path.is_symlink()}


def _is_equal(row: tuple[str, str | None, str | None]) -> bool:
    """Whether both values of a key are equal."""
    _, value, other = row
    return value == other


def said(event: Record) -> str:
    """An event in words, without the step, which has its own column."""
    fields = {key: value for key, value in event.items() if key not in ("schema_version", "time")}
    return describe(fields).removeprefix(f"[{event.get('step')}] ")


def flat_json(value: Any) -> dict[str, str]:
    """Every value as JSON, by its dotted key."""
    return {
        key: json.dumps(part, ensure_ascii=False, default=str) for key, part in flat(value).items()
    }


def _start(query: Query) -> int:
    """The number of a table's first row. Raises ValueError."""
    return min(max(int(query.get("start") or 0), 0), _MAX_START)


def _size_and_type(path: Path) -> tuple[int, int, str]:
    """Width and height as shown, and the media type.

    Raises one of ``_PICTURE_ERRORS`` when it is not a picture, or too large.
    """
    with regular(path) as file, Image.open(file, formats=FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width}x{height} pixels, the limit is {MAX_PIXELS}")
        media_type = image.get_format_mimetype() or ""
        if image.getexif().get(ORIENTATION_TAG, 1) >= _FIRST_ROTATED_ORIENTATION:
            return height, width, media_type
        return width, height, media_type
