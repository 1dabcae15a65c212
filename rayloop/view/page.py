"""``python -m rayloop report``: a run folder as one HTML file, or as JSON with ``--files``.

    training_metrics.json      {"schema_version", "steps": [...], "metrics": {name: [...]}}
    task_results/<task>.json   {"schema_version", "task", "source",
                                "evaluations": [...], "training": [...]}

A metric has a value, or null, for each step. ``evaluations`` are all held-out answers to the task,
``training`` the recorded trajectories (``keep_rollouts``); each has its step and reward (null:
``unscored`` has the reason). A file is named after its task, quoted as in a URL.
"""

import base64
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from rayloop.core.failures import ConfigError
from rayloop.core.files import write_whole
from rayloop.measure.report import JUDGED, verdict
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import SCHEMA_VERSION, encode
from rayloop.view.charts import charts, drawn, is_constant
from rayloop.view.filmstrip import Filmstrips
from rayloop.view.formatting import number
from rayloop.view.health import RunHealth
from rayloop.view.reader import (
    ENDS,
    Record,
    by_step,
    compared,
    evenly,
    gains,
    rollout_groups,
    series,
)

PAGES = jinja2.PackageLoader("rayloop.view", "pages")
COMPARED_TASKS = 4
"""Held-out tasks whose first and last answers are shown."""
ROUTINE = (
    "starting",
    "started",
    "start",
    "begin",
    "logprob_check",
    "self_test",
    "evaluated",
    "controls",
    "gain",
    "trained",
    "checkpoint",
    *ENDS,
)


def write_page(run: Path, out: Path | None, groups: int) -> Path:
    """Write a run's page with at most ``groups`` groups to ``out`` (default: its ``report.html``).

    Raises ConfigError.
    """
    folder = RunFolder.begun(run)
    target = out or folder.path / "report.html"
    text = page(content(folder, groups))
    try:
        target.write_bytes(text.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Name another file with --out."
        ) from error
    return target


def page(data: Mapping[str, Any]) -> str:
    """The template with ``data`` in it, escaped. A browser runs only the page's own script."""
    environment = templates()
    script = PAGES.get_source(environment, "filter.js")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html").render(**data, js=script, digest=digest)


def templates(*others: jinja2.BaseLoader) -> jinja2.Environment:
    """The report's templates, after the templates of ``others``; they escape every value."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([*others, PAGES]), autoescape=True, trim_blocks=True
    )
    environment.filters["number"] = _number_or_dash
    environment.filters["score"] = score
    environment.filters["verdict"] = verdict
    environment.globals["JUDGED"] = JUDGED
    return environment


def _number_or_dash(value: Any) -> str:
    return "–" if value is None else number(float(value))


def score(value: Any) -> str:
    """A reward, an advantage or their difference, with three decimals, so that a column aligns."""
    return f"{value:.3f}" if isinstance(value, int | float) else "–"


def content(folder: RunFolder, groups: int) -> Record:
    """Everything that the page shows, as its template expects it."""
    events = list(folder.events)
    metrics = list(folder.metrics)
    filmstrips = Filmstrips(folder)
    times = [record["time"] for record in (*events, *metrics)]
    health = RunHealth(folder, {})
    health.update()
    evaluations = by_step(events, "evaluated")
    controls = by_step(events, "controls")
    all_charts = charts(metrics, evaluations)
    constant_lines = chain.from_iterable(c["lines"] for c in all_charts if is_constant(c))
    recorded = list(rollout_groups(folder))
    pairs = evenly(compared(folder), COMPARED_TASKS)
    return {
        "name": folder.path.name,
        "config": folder.configuration,
        "start": next((event for event in reversed(events) if event["event"] == "start"), {}),
        "lineages": [event for event in events if event["event"] == "begin"],
        "step": metrics[-1]["step"] if metrics else 0,
        "end": health.end,
        "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(times))) if times else "",
        "seconds": max(times) - min(times) if times else 0.0,
        "charts": [drawn(chart) for chart in all_charts if not is_constant(chart)],
        "constants": [(line["name"], line["points"][0][1]) for line in constant_lines],
        "ledger": ledger(health.end, metrics),
        "evaluations": evaluations,
        "held_out": held_out_scores(evaluations),
        "gains": gains(events),
        "controls": controls,
        "verdict": verdict(controls[-1]) if controls else "",
        "incidents": [event for event in events if event["event"] not in ROUTINE],
        "recorded": len(recorded),
        "compared": [
            filmstrips.group([*map(held_out, pair)], folder.evaluations.path) for pair in pairs
        ],
        "groups": [
            filmstrips.group(members, folder.rollouts.path) for members in evenly(recorded, groups)
        ],
        "images": filmstrips.images,
        "damaged": folder.damage(),
    }


def held_out(item: Record) -> Record:
    """An answer of an evaluation, with its step, as the record of a member."""
    turns = item.get("turns") or [{"text": item["text"], "sampled": True, "images": []}]
    member = {
        "sample": f"step {item['step']}",
        "group": 0,
        "prompt": "",
        "status": "held out",
        "replayed": False,
    }
    return {"source": "", **item, **member, "turns": turns}


def held_out_scores(evaluations: Sequence[Record]) -> list[str]:
    """The names of held-out metrics, bounds and controls left out."""
    return [
        name
        for name in series(evaluations)
        if re.match(r"val(_sampled)?/(?!control/)(?!.*/(low|high)$)", name)
    ]


def ledger(end: Record | None, metrics: Sequence[Record]) -> dict[str, float]:
    """State and reason -> trajectories, as last recorded."""
    last = metrics[-1] if metrics else {}
    counts = {
        name.removeprefix("ledger/"): value
        for name, value in last.items()
        if name.startswith("ledger/")
    }
    return counts if end is None else end["ledger"]


METRICS = "training_metrics.json"
RESULTS = "task_results"
HELD_OUT_KEYS = ("step", "arm", "sample", "reward", "components", "unscored")
TRAINED_KEYS = (
    "step",
    "group",
    "sample",
    "end_reason",
    "reward",
    "components",
    "flags",
    "unscored",
    "status",
    "replayed",
)
_MAX_NAME_BYTES = 200
"""The most bytes of a file's name; file systems take 255."""


def write_files(run: Path) -> list[Path]:
    """Write ``training_metrics.json`` and ``task_results`` into the run's folder; return both.

    Raises ConfigError without a run.
    """
    folder = RunFolder.begun(run)
    results = folder.path / RESULTS
    results.mkdir(exist_ok=True)
    for old in results.glob("*.json"):
        old.unlink()
    for index, (task, records) in enumerate(task_results(folder).items()):
        name = quote(task, safe=" ,=@")
        if len(name) > _MAX_NAME_BYTES:
            name = f"{name[:_MAX_NAME_BYTES]}-{index}"
        write_whole(results / f"{name}.json", _bytes({"task": task, **records}), durable=False)
    write_whole(folder.path / METRICS, _bytes(training_metrics(folder)), durable=False)
    return [folder.path / METRICS, results]


def training_metrics(folder: RunFolder) -> dict[str, Any]:
    """Each metric's values [steps]."""
    records = list(folder.metrics)
    steps = [int(record["step"]) for record in records]
    metrics: dict[str, list[float | None]] = {}
    for name, points in series(records).items():
        values = dict(points)
        metrics[name] = [values.get(step) for step in steps]
    return {"steps": steps, "metrics": metrics}


def task_results(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Task -> its source, its held-out answers and its trajectories, in the order of steps."""
    results: dict[str, dict[str, Any]] = {}
    for kind, dump, keys in (
        ("evaluations", folder.evaluations, HELD_OUT_KEYS),
        ("training", folder.rollouts, TRAINED_KEYS),
    ):
        for record in dump:
            empty: dict[str, Any] = {
                "source": record.get("source", ""),
                "evaluations": [],
                "training": [],
            }
            result = results.setdefault(record["task"], empty)
            result[kind].append({key: record[key] for key in keys if key in record})
    return results


def _bytes(content: Mapping[str, Any]) -> bytes:
    return (encode({"schema_version": SCHEMA_VERSION, **content}) + "\n").encode()
