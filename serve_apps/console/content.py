"""What each page of the console shows, read from a run's folder.

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

import httpx
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from rayloop.config.explain import defaults
from rayloop.core.failures import RayloopError
from rayloop.core.files import content, regular
from rayloop.data.images import FORMATS, MOST_BYTES, ORIENTATION
from rayloop.judge.api import JudgeVersion
from rayloop.judge.calibrate import CALIBRATION
from rayloop.judge.transport import ConnectionSettings, JudgeConnection
from rayloop.measure.report import verdict
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder, configuration
from rayloop.run.place import own_copy
from rayloop.view.charts import charts, drawn, is_constant
from rayloop.view.index import EpisodeIndex
from rayloop.view.page import ROUTINE, held_out, held_out_scores, ledger
from rayloop.view.progress import remaining
from rayloop.view.reader import Record, Tail, answers, by_step, evenly, members
from rayloop.view.status import state, status
from rayloop.view.strips import MAX_PIXELS, Films, shrunk
from rayloop.view.words import describe, gained

URGENT, ALARMS = ("alarm", "failed", "stalled"), 3
"""Events that the overview shows first, and how many of them."""
ROWS = 50
"""Rows of a table; the rest is on further pages."""
FURTHEST = 2**31
"""Where a table can begin."""
STEPS = 24
"""Newest steps that the overview shows one by one."""
BEAT = 10
"""Seconds after which the pages of a live run say anew how long ago something was."""
LARGE = 2**20
"""Bytes of a picture that is sent as it is; a larger one is shrunk."""
ANSWER = 2.0
"""Seconds for each answer of a judge."""
BROKEN = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What PIL raises for a file that is no picture."""
Asked = Mapping[str, str]
"""The query of a page's address."""


class Absent(LookupError):
    """There is no such step, group, episode, answer, run or picture on record."""


class Console:
    """The pages of one run.

    Thread-safe; each page is made from what the folder holds at that moment.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Raises ConfigError when ``report.boxes`` cannot be loaded, OSError and sqlite3.Error
        without a place for the index.
        """
        self.folder, self.tint = folder, Films(folder).tint
        self.metrics, self.happened, self.index = (
            Tail(folder.metrics),
            Tail(folder.events),
            EpisodeIndex(folder),
        )
        data = folder.configuration.get("data") or {}
        files = [Path(data[name]) for name in ("train", "eval") if isinstance(data.get(name), str)]
        self.roots = [
            root.resolve()
            for root in dict.fromkeys((folder.path, *(file.parent for file in files)))
        ]
        """Folders whose pictures are shown: all of the run's own, and of those of its data files
        what a page has shown.
        """
        self._shown, self._began = set[Path](), time.time()

    def stamp(self) -> str:
        """Another text whenever a page may have changed."""
        run = self.folder
        found: list[Any] = [self._began, int(time.time() / BEAT) if run.lock.holder() else None]
        for path in (
            run.metrics.path,
            run.events.path,
            run.config,
            run.rollouts.path,
            run.evaluations.path,
            self.index.path,
        ):
            with suppress(OSError):
                found.append((path.name, path.stat().st_mtime_ns, path.stat().st_size))
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def overview(self, asked: Asked) -> Record:
        """How the run does: state, curves, ledger, time, actors, incidents."""
        metrics, events = self.metrics.records(), self.happened.records()
        found, controls = (
            status(self.folder, time.time(), events),
            list(by_step(events, "controls").values()),
        )
        return {
            "state": state(found),
            "status": found,
            "left": remaining(metrics[-STEPS:], found["steps"] or 0) if found["process"] else 0.0,
            **self.curves(asked, 6),
            "ledger": ledger(found["end"], metrics),
            "newest": metrics[: -STEPS - 1 : -1],
            "incidents": [event for event in reversed(events) if event["event"] not in ROUTINE][
                :10
            ],
            "alarms": [event for event in reversed(events) if event["event"] in URGENT][:ALARMS],
            "gains": [line for end in by_step(events, "gain").values() for line in gained(end)],
            "verdict": verdict(controls[-1]) if controls else "",
        }

    def curves(self, asked: Asked, most: int | None = None) -> Record:
        """Every chart, or the first ones."""
        found = charts(
            self.metrics.records(), list(by_step(self.happened.records(), "evaluated").values())
        )
        return {
            "charts": [
                drawn(chart)
                for chart in [chart for chart in found if not is_constant(chart)][:most]
            ]
        }

    def step(self, asked: Asked, step: int) -> Record:
        """A step: its groups, events and metrics. Raises Absent."""
        records, groups = (
            {record["step"]: record for record in self.metrics.records()},
            members(self.folder, step),
        )
        if step not in records and not groups:
            raise Absent(f"step {step} is not on record")
        events = [
            event
            for event in self.happened.records()
            if event.get("step") == step and event["event"] != "trained"
        ]
        return {
            "step": step,
            "numbers": list(records),
            "record": records.get(step, {}),
            "groups": groups,
            "events": events,
        }

    def group(self, asked: Asked, step: int, number: int) -> Record:
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

    def episode(self, asked: Asked, step: int, number: int, sample: int) -> Record:
        """An episode as film strip, as the tree of what happened, and as messages.

        Raises Absent.
        """
        found = {record["sample"]: record for record in members(self.folder, step).get(number, ())}
        if sample not in found:
            raise Absent(
                f"episode {sample} of group {number} of step {step} is not on record"
                " (keep_rollouts)"
            )
        shown = self._film([found[sample]], self.folder.rollouts.path)
        return {"step": step, "numbers": sorted(found), "record": found[sample], **shown}

    def _film(self, of: list[Record], folder: Path) -> Record:
        films = Films(self.folder, self._picture)
        return {"group": films.group(of, folder), "images": films.images}

    def rollouts(self, asked: Asked) -> Record:
        """Episodes, or groups, that fit what was ``asked``: filters of the index, ``view``,
        ``order``, ``start``.
        """
        self.index.update(seconds=0.1)
        groups, start = asked.get("view") != "episodes", _start(asked)
        total, rows = self.index.search(asked, asked.get("order", ""), groups, start, ROWS)
        return {
            "asked": dict(asked),
            "rows": rows,
            "groups": groups,
            "start": start,
            "total": total,
            **self.index.state(),
        }

    def evaluations(self, asked: Asked) -> Record:
        """Held-out scores, controls, and the tasks of two evaluations (``before``, ``after``) side
        by side, largest loss first.
        """
        events, steps, start = (
            self.happened.records(),
            list(self.folder.evaluations.files()),
            _start(asked),
        )
        chosen = [
            int(asked.get(name) or steps[place])
            for name, place in (("before", 0), ("after", -1))
            if steps
        ]
        pairs = answers(self.folder, *chosen) if chosen and set(chosen) <= set(steps) else []
        pairs.sort(key=lambda pair: (pair[-1]["reward"] or 0.0) - (pair[0]["reward"] or 0.0))
        evaluations, controls = (
            list(by_step(events, name).values()) for name in ("evaluated", "controls")
        )
        return {
            "evaluations": evenly(evaluations[::-1], 12)[::-1],
            "held_out": held_out_scores(evaluations),
            "controls": controls,
            "steps_evaluated": steps,
            "asked": dict(zip(("before", "after"), map(str, chosen), strict=False)),
            "rows": pairs[start : start + ROWS],
            "start": start,
            "total": len(pairs),
        }

    def pair(self, asked: Asked, before: int, after: int) -> Record:
        """The answers of two evaluations to one ``task``. Raises Absent."""
        pairs = (
            answers(self.folder, before, after)
            if {before, after} <= self.folder.evaluations.files().keys()
            else []
        )
        if (
            found := next((pair for pair in pairs if pair[0]["task"] == asked.get("task")), None)
        ) is None:
            raise Absent(
                f"no task of this name has an answer in both of the evaluations of steps {before}"
                f" and {after}"
            )
        return self._film([*map(held_out, found)], self.folder.evaluations.path)

    def configuration(self, asked: Asked) -> Record:
        """The configuration, first what differs from the defaults; or what differs from that of
        ``other``: a run in the same folder, or an earlier attempt of this. Raises Absent.
        """
        run, other = self.folder.path, asked.get("other", "")
        others = {
            path.parent.name: path
            for path in sorted(run.parent.glob("*/config.yaml"))
            if path.parent != run
        }
        others |= {path.name: path for path in sorted(run.glob("config.yaml.*"))}
        others = {
            name: path for name, path in others.items() if not path.is_symlink()
        }  # it may lead to any file
        if other and other not in others:
            raise Absent(f"{other} is neither a run beside this one nor an earlier attempt of it")
        mine = flat(self.folder.configuration)
        theirs = flat(configuration(others[other])) if other else mine
        if other:
            rows = [
                (key, mine.get(key), theirs.get(key)) for key in sorted(mine.keys() | theirs.keys())
            ]
            return {
                "rows": [row for row in rows if row[1] != row[2]],
                "others": list(others),
                "other": other,
            }
        usual = flat(defaults(RunConfig, self.folder.configuration))
        rows = sorted(
            ((key, value, usual.get(key)) for key, value in mine.items()),
            key=lambda row: row[1] == row[2],
        )
        return {"rows": rows, "others": list(others), "other": ""}

    def events(self, asked: Asked) -> Record:
        """Events, the newest first: of one ``kind``, or all but the routine of training."""
        kind, start, records = asked.get("kind", ""), _start(asked), self.happened.records()
        fits = [
            e
            for e in reversed(records)
            if (e["event"] == kind if kind else e["event"] not in ("trained", "checkpoint"))
        ]
        kinds = sorted({event["event"] for event in records})
        return {
            "kinds": kinds,
            "asked": {"kind": kind},
            "rows": fits[start : start + ROWS],
            "start": start,
            "total": len(fits),
        }

    def judge(self, asked: Asked) -> Record:
        """What is on record of the judge: its settings, verdicts of the newest recorded step, and
        what it left without a reward.
        """
        newest, events = max(self.folder.rollouts.files(), default=0), self.happened.records()
        source = (self.folder.configuration.get("reward") or {}).get("source") or {}
        return {
            "source": source,
            "calibrated": calibrated(self.folder.path.with_name(CALIBRATION)),
            # Starlette makes pages in threads, where no event loop runs.
            "now": asyncio.run(judge_now(source.get("with") or {})) if self._own() else {},
            "newest": newest,
            "records": [
                record for group in members(self.folder, newest).values() for record in group
            ][:ROWS],
            "scores": next(iter(self.metrics.records()[-1:]), {}),
            "events": [
                event
                for event in reversed(events)
                if event["event"] in ("unscored", "grader_error")
            ][:ROWS],
        }

    def _own(self) -> bool:
        """Whether it is a live run of this user: the settings of any other may name a judge, and a
        file of ours as its key.
        """
        return self.folder.lock.holder() is not None and own_copy(self.folder.cluster).exists()

    def _picture(self, path: Path, tint: float) -> Record:
        """Where the page finds the picture, and its size; why not, for one that lies elsewhere or
        is none.
        """
        try:
            path = path.resolve(strict=True)
            place = next(
                (place for place, root in enumerate(self.roots) if path.is_relative_to(root)), None
            )
            if place is None:
                return {"why": f"{path} lies neither in the run's folder nor beside its data"}
            width, height, _ = _look(path)
        except BROKEN as error:
            return {"why": f"{path}: {error}"}
        self._shown.add(path)
        return {
            "width": width,
            "height": height,
            "uri": f"/picture/{place}/{quote(str(path.relative_to(self.roots[place])))}",
        }

    def picture(self, place: int, name: str) -> tuple[bytes, str]:
        """A picture below a root, without its tint, and its media type.

        Raises Absent for anything else.
        """
        with suppress(*BROKEN, IndexError):
            path = (self.roots[place] / name).resolve(strict=True)
            if path.is_relative_to(self.roots[place]) and (place == 0 or path in self._shown):
                *_, kind = _look(path)
                data, tint = content(path, MOST_BYTES), 0.0 if place else self.tint
                return (
                    (shrunk(data, tint), "image/webp")
                    if tint or len(data) > LARGE
                    else (data, kind)
                )
        raise Absent(f"{name} is no picture of this run")


async def judge_now(settings: Record) -> Record:
    """What the judge of these settings answers: ``why`` it is not ready, ``version``, and
    ``figures`` of it and of the client that serves ``metrics_port``. Empty without a judge.
    """
    if not isinstance(given := settings.get("judge"), Mapping):
        return {}
    place = {key: value for key, value in given.items() if key in ConnectionSettings.model_fields}
    found: Record = {"why": "", "figures": []}
    try:
        limits = ConnectionSettings.model_validate(
            {**place, "connect_timeout": 1.0, "request_timeout": ANSWER}
        )
        connection = JudgeConnection(limits)
    except (RayloopError, ValueError) as error:
        return {**found, "why": str(error)}
    try:
        found["version"] = JudgeVersion.model_validate_json(await connection.get("/version"))
        found["figures"] = figures((await connection.get("/metrics")).decode(errors="replace"))
        if port := settings.get("metrics_port"):
            async with httpx.AsyncClient(trust_env=False, timeout=ANSWER) as http:
                found["figures"] += figures(
                    (await http.get(f"http://127.0.0.1:{port}/metrics")).text
                )
        # Last, since it raises for a judge that is not ready: version and figures are read by then.
        await connection.get("/readyz")
    except (RayloopError, ValueError, httpx.HTTPError) as error:
        found["why"] = str(error) or type(error).__name__
    finally:
        await connection.close()
    return found


def calibrated(file: Path) -> Record:
    """What ``judge calibrate`` wrote there; empty when it wrote nothing that can be read."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return {}


def figures(text: str) -> list[tuple[str, str, float | None]]:
    """Meaning, labels and value of a judge's metrics in Prometheus' format; of a histogram its
    mean.
    """
    rows = list[tuple[str, str, float | None]]()
    for family in text_string_to_metric_families(text):
        found: dict[str, dict[str, float]] = {}
        for sample in family.samples if family.name.startswith("judge") else ():
            labels = ", ".join(
                value
                for key, value in sample.labels.items()
                if value and key not in ("replica", "le")
            )
            found.setdefault(labels, {})[sample.name.removeprefix(family.name)] = sample.value
        for labels, of in found.items():
            mean = of["_sum"] / of["_count"] if of.get("_count") else None
            rows.append((family.documentation, labels, of.get("_total", of.get("", mean))))
    return rows


def said(event: Record) -> str:
    """What happened, in words, without the step, which stands beside it."""
    plain = {key: value for key, value in event.items() if key not in ("schema_version", "time")}
    return describe(plain).removeprefix(f"[{event.get('step')}] ")


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Dotted key -> value as JSON."""
    if isinstance(value, Mapping) and value:
        return {
            key: text
            for name, part in value.items()
            for key, text in flat(part, f"{path}.{name}" if path else name).items()
        }
    return {path: json.dumps(value, ensure_ascii=False, default=str)}


def _start(asked: Asked) -> int:
    """From which row on a table is shown. Raises ValueError."""
    return min(max(int(asked.get("start") or 0), 0), FURTHEST)


def _look(path: Path) -> tuple[int, int, str]:
    """Width and height as shown, and the media type.

    Raises one of ``BROKEN`` when it is no picture, or too large.
    """
    with regular(path) as file, Image.open(file, formats=FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width}x{height} pixels, the limit is {MAX_PIXELS}")
        turned = image.getexif().get(ORIENTATION, 1) >= 5
        return *((height, width) if turned else (width, height)), image.get_format_mimetype() or ""
