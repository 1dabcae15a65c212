"""``python -m rayloop report``: a run folder as one HTML file, and with ``--files`` as JSON for other tools.

    training_metrics.json      {"schema_version", "steps": [...], "metrics": {name: [of each step, or null]}}
    task_results/<task>.json   {"schema_version", "task", "source", "evaluations": [...], "training": [...]}

``evaluations`` are all held-out answers to the task, ``training`` the recorded trajectories (``keep_rollouts``); each has its step
and reward (null: ``unscored`` says why). A task's name is quoted as in a URL to be a file's name.
"""

import base64
import io
import json
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from urllib.parse import quote

from rayloop.core.failures import ConfigError, RayloopError
from rayloop.core.files import write_whole
from rayloop.core.protocols import BoxReader
from rayloop.core.types import ImageSource
from rayloop.data.images import decode, probe
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import SCHEMA_VERSION, JsonLines, encode
from rayloop.view.reader import (
    ENDS,
    Record,
    box_reader,
    by_step,
    configuration,
    evenly,
    image_path,
    matching,
    open_run,
    rollout_groups,
    series,
    tint_note,
)
from rayloop.view.words import gained

MAX_SIDE = 1280
"""Pixels; larger images are shrunk for the page. The originals stay where the run keeps them."""
MAX_PIXELS = 100_000_000
"""Images beyond this are named instead of shown."""

CURVES = ("val_sampled/reward/mean", "val/reward/mean")
CHARTS = (
    ("Held-out reward, sampled and greedy (shaded: 95 % interval, dotted: at the start)", *CURVES),
    ("Reward: training (reward/mean), held-out, controls", "reward/mean", *CURVES, "val/control/*/reward/mean"),
    ("Reward components", "reward/component/*/mean"),
    ("Held-out components", "val/*/mean"),
    ("Loss", "actor/loss"),
    ("Gradient norm", "actor/grad_norm"),
    ("KL to the reference (nats/token)", "actor/kl"),
    ("Gap of engine and trainer (nats)", "actor/logprob_mismatch_mean", "actor/logprob_mismatch_k3"),
    ("Largest ratio", "actor/ratio_max"),
    ("Share of clipped tokens", "actor/clip_*", "actor/capped"),
    ("Effective sample size", "actor/effective_sample_size"),
    ("Entropy (nats/token)", "actor/entropy"),
    ("Time per phase (s)", "timing_s/*"),
    ("Trajectories not trained", "filtered/*", "excluded/*", "stale/*", "surplus/*", "cancelled/*"),
    ("Trained and accepted share", "rollout/trained_share", "rollout/acceptance"),
    ("Tokens per answer", "response_length/mean", "response_length/max"),
    ("Turns per trajectory", "rollout/turns/mean"),
    ("End reasons, and answers cut by a limit of tokens (share)", "end_reason/*", "response_length/clip_ratio"),
    ("Flags (share)", "flag/*"),
)
COUNTS = ("filtered/", "excluded/", "stale/", "surplus/", "cancelled/", "end_reason/", "flag/")
"""Metrics that are absent where they would be 0."""
ROUTINE = ("start", "begin", "logprob_check", "self_test", "evaluated", "controls", "gain", "trained", "checkpoint", *ENDS)


def write_page(run: Path, out: Path | None, groups: int) -> Path:
    """Write a run's page with at most ``groups`` groups to ``out`` (default: its ``report.html``). Raises ConfigError."""
    folder = open_run(run)
    target = out or folder.path / "report.html"
    text = page(content(folder, groups))
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Name another file with --out.") from error
    return target


def page(data: Mapping[str, Any]) -> str:
    """The template with ``data`` in it. ``<`` is written as an escape, so that no text can end the data's element."""
    template = (files("rayloop.view") / "pages" / "trajectories.html").read_text(encoding="utf-8")
    text = json.dumps(json.loads(encode(data)), separators=(",", ":")).replace("<", "\\u003c")
    before, after = template.split("/*DATA*/")
    return before + text + after


def content(folder: RunFolder, groups: int) -> Record:
    """Everything that the page shows, as the template's script expects it."""
    config, events, metrics = configuration(folder), list(folder.events), list(folder.metrics)
    evaluations = by_step(events, "evaluated")
    recorded = list(rollout_groups(folder))
    drawn = charts(metrics, list(evaluations.values()))
    images = Images(folder.rollouts.path)
    reader = box_reader(config)
    shown = evenly(recorded, groups)
    return {
        "name": folder.path.name,
        "facts": facts(config, events, metrics),
        "charts": [chart for chart in drawn if not is_constant(chart)],
        "constants": [(line["name"], line["points"][0][1]) for c in drawn if is_constant(c) for line in c["lines"]],
        "ledger": ledger(events, metrics),
        "evaluations": list(evaluations.values()),
        "gains": [line for end in by_step(events, "gain").values() for line in gained(end)],
        "controls": list(by_step(events, "controls").values()),
        "incidents": [event for event in events if event["event"] not in ROUTINE],
        "recorded": len(recorded),
        "groups": [_group(members, images, reader) for members in shown],
        "notes": notes(config, len(recorded), len(shown)),
        "images": images.found,
    }


def notes(config: Mapping[str, Any], recorded: int, shown: int) -> list[str]:
    """Which groups the page shows, and how their pictures differ from the originals."""
    if not recorded:
        return []
    keep = config.get("keep_rollouts")
    some = "some groups" if keep is None else f"at most {keep} groups"
    part = f"all {recorded} of them" if shown == recorded else f"{shown} of these {recorded}, evenly spread (--groups)"
    tint = tint_note(config)
    return [
        f"A selection: the run wrote down {some} of each step, those that it began first (keep_rollouts), and this page shows "
        f"{part}. They are examples; what is true of the whole run is in the curves and the ledger.",
        *([tint] if tint else []),
    ]


def facts(config: Mapping[str, Any], events: Sequence[Record], metrics: Sequence[Record]) -> list[tuple[str, str]]:
    """Label and text of what identifies the run and says how it ended."""
    begins = [event for event in events if event["event"] == "begin"]
    start = next((event for event in reversed(events) if event["event"] == "start"), {})
    last = ending(events)
    end = "not on record: still running, or killed" if last is None else last["event"]
    why = f" ({last['error']}: {last['why']})" if last and "why" in last else ""
    lineages = (f"{e['lineage']} from {e['restored'] or 'the start model'}" for e in begins)
    times = [record["time"] for record in (*events, *metrics)]
    software = ", ".join(f"{name} {version}" for name, version in start.get("software", {}).items())
    rows = [
        ("configuration", start.get("config", "")),
        ("model", (config.get("model") or {}).get("path", "")),
        ("data", (config.get("data") or {}).get("train", "")),
        ("software", software),
        ("lineages", ", ".join(lineages)),
        ("steps", f"{metrics[-1]['step'] if metrics else 0} of {config.get('steps', '?')}"),
        ("end", end + why),
        ("began", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(times))) if times else ""),
        ("duration", f"{max(times) - min(times):.0f} s" if times else ""),
    ]
    return [(label, str(text)) for label, text in rows if text]


def ending(events: Sequence[Record]) -> Record | None:
    """The event that ended the run; None when its newest lineage has not ended."""
    last = next((event for event in reversed(events) if event["event"] in (*ENDS, "begin")), None)
    return last if last and last["event"] in ENDS else None


def charts(metrics: Sequence[Record], evaluations: Sequence[Record]) -> list[Record]:
    """Title and lines of each chart that has data; held-out scores come from ``evaluations``, which has step 0 too."""
    lines: dict[str, Any] = {k: v for k, v in series(metrics).items() if not k.startswith("val/")} | series(evaluations)
    steps = [record["step"] for record in metrics]
    for name in lines:
        if name.startswith(COUNTS):
            values = dict(lines[name])
            lines[name] = [(step, values.get(step, 0.0)) for step in steps]
    found = ((title, matching(lines, patterns)) for title, *patterns in CHARTS)
    return [{"title": t, "lines": [_line(n, lines, t == CHARTS[0][0]) for n in names]} for t, names in found if names]


def _line(name: str, lines: Mapping[str, Any], bounded: bool) -> Record:
    """``bounded``: with where it began, and the bounds of its interval, if it has them."""
    line: Record = {"name": name, "points": lines[name]}
    if bounded:
        prefix = name.removesuffix("mean")
        line |= {"start": lines[name][0][1], **{bound: lines.get(prefix + bound, []) for bound in ("low", "high")}}
    return line


def is_constant(chart: Record) -> bool:
    """Whether each line of the chart has one value at several steps: it is named, and not drawn."""
    return all(len(line["points"]) > 1 and len({value for _, value in line["points"]}) == 1 for line in chart["lines"])


def ledger(events: Sequence[Record], metrics: Sequence[Record]) -> dict[str, float]:
    """State and reason -> trajectories, as last recorded."""
    end, last = ending(events), metrics[-1] if metrics else {}
    counts = {name.removeprefix("ledger/"): value for name, value in last.items() if name.startswith("ledger/")}
    return counts if end is None else end["ledger"]


class Images:
    """The page's images, each once. ``found``: sha256 -> ``{width, height, uri}``, or ``{why}`` when it cannot be shown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: dict[str, Record] = {}

    def add(self, entries: Sequence[Mapping[str, Any]]) -> list[str]:
        """Their hashes, in order."""
        for entry in entries:
            if entry["sha256"] not in self.found:
                self.found[entry["sha256"]] = _embedded(image_path(entry, self._folder))
        return [entry["sha256"] for entry in entries]


def _embedded(path: Path) -> Record:
    try:
        data, width, height = probe(ImageSource(str(path)), MAX_PIXELS)
    except RayloopError as error:
        return {"why": str(error)}
    image, file = decode(data), io.BytesIO()
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    image.save(file, "WEBP", quality=90)
    uri = "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
    return {"width": width, "height": height, "uri": uri}


def _group(members: Sequence[Record], images: Images, reader: BoxReader | None) -> Record:
    first = members[0]
    truth = first.get("truth")
    rewards = [member["reward"] for member in members if member["reward"] is not None]
    statuses = [member["status"] for member in members]
    return {
        **{key: first[key] for key in ("step", "group", "task", "source", "prompt")},
        "truth": "" if truth is None else json.dumps(truth, ensure_ascii=False),
        "true": [] if reader is None or truth is None else reader.true(truth),
        "images": images.add(first["images"]),
        "verdicts": list(dict.fromkeys([*statuses, *("replayed" for m in members if m["replayed"])])),
        "mean": fmean(rewards) if rewards else None,
        "std": pstdev(rewards) if rewards else None,
        "members": [_member(member, images, reader) for member in members],
    }


def _member(member: Record, images: Images, reader: BoxReader | None) -> Record:
    """The record without what the group has in common, with its boxes; its images are named by hash."""
    common = ("schema_version", "step", "group", "task", "source", "prompt", "truth", "images")
    answers = [turn["text"] for turn in member["turns"] if turn["sampled"]]
    return {
        **{key: value for key, value in member.items() if key not in common},
        "turns": [{**turn, "images": images.add(turn["images"])} for turn in member["turns"]],
        "boxes": reader.answered(answers[-1]) if reader and answers else [],
    }


METRICS, RESULTS = "training_metrics.json", "task_results"
HELD_OUT = ("step", "arm", "sample", "reward", "components", "unscored")
TRAINED = ("step", "group", "sample", "end_reason", "reward", "components", "flags", "unscored", "status", "replayed")
_LONGEST = 200
"""Bytes of a file's name; file systems take 255."""


def write_files(run: Path) -> list[Path]:
    """Write ``training_metrics.json`` and ``task_results`` into the run's folder; return both. Raises ConfigError without a run."""
    folder = open_run(run)
    results = folder.path / RESULTS
    results.mkdir(exist_ok=True)
    for old in results.glob("*.json"):
        old.unlink()
    for number, (task, found) in enumerate(task_results(folder).items()):
        name = quote(task, safe=" ,=@")
        name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{number}"
        write_whole(results / f"{name}.json", _bytes({"task": task, **found}), durable=False)
    write_whole(folder.path / METRICS, _bytes(training_metrics(folder)), durable=False)
    return [folder.path / METRICS, results]


def training_metrics(folder: RunFolder) -> dict[str, Any]:
    """Each metric's values [steps]."""
    records = list(folder.metrics)
    steps = [int(record["step"]) for record in records]
    return {
        "steps": steps,
        "metrics": {name: [dict(points).get(step) for step in steps] for name, points in series(records).items()},
    }


def task_results(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Task -> its source, its held-out answers and its trajectories, in the order of steps."""
    found: dict[str, dict[str, Any]] = {}
    for kind, dump, keys in (("evaluations", folder.evaluations, HELD_OUT), ("training", folder.rollouts, TRAINED)):
        for record in (one for file in dump.files().values() for one in JsonLines(file)):
            empty: dict[str, Any] = {"source": record["source"], "evaluations": [], "training": []}
            of_task = found.setdefault(record["task"], empty)
            of_task[kind].append({key: record[key] for key in keys if key in record})
    return found


def _bytes(content: Mapping[str, Any]) -> bytes:
    return (encode({"schema_version": SCHEMA_VERSION, **content}) + "\n").encode()
