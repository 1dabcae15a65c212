"""Each event of a run in plain words. The run folder has all of its fields."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import category

import jinja2
import yaml

from rayloop.config.explain import short
from rayloop.core.groups import Outcome, Scored
from rayloop.measure.report import table
from rayloop.run.folder import RolloutRecord

Record = Mapping[str, Any]
_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode's characters that are written out, but for tabs, line breaks, and the
joiners of scripts and emoji.
"""

TEMPLATES: dict[str, str] = yaml.safe_load(
    (Path(__file__).parent / "words.yaml").read_text(encoding="utf-8")
)
PHASES = {
    "start": "starting actors",
    "verify": "checking that engine and trainer agree",
    "gen": "generating",
    "update_actor": "training",
    "update_weights": "weight sync",
    "testing": "evaluating",
    "save_checkpoint": "saving a checkpoint",
}


EXAMPLE = "For example task "
"""How the sentence begins that quotes an answer of a run that cannot go on."""


def doing(phase: str, progress: tuple[int, int] | None) -> str:
    """One short line; ``progress`` is (done, of how many)."""
    words = PHASES.get(phase, phase)
    return words if progress is None else f"{words} {progress[0]}/{progress[1]}"


def describe(record: Record) -> str:
    """One line for an event, a table for controls, tracebacks whole.

    An event without words of its own, or one whose fields are those of another version, is shown
    with its fields.
    """
    kind = record["event"]
    try:
        said = (
            _template(kind).render(record)
            if kind in TEMPLATES
            else _WORDS.get(kind, _fields)(record)
        )
    except (KeyError, TypeError, ValueError, jinja2.UndefinedError):
        said = _fields(record)
    when = f"[{record['step']}] " if "step" in record else ""
    trace = f"\n{record['traceback']}" if "traceback" in record else ""
    return f"{when}{said}{trace}"


@cache
def _template(kind: str) -> jinja2.Template:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)  # lines of text, not of HTML
    environment.filters |= {"span": span, "number": number}
    return environment.from_string(TEMPLATES[kind])


def span(seconds: float) -> str:
    """A duration that a person waits for: ``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def visible(text: str) -> str:
    """The text with what would steer a terminal, or cannot be written to it, written out, as ``\\x1b``: control characters but tabs
    and line breaks, marks of direction, other separators of lines, halves of surrogate pairs."""
    return "".join(
        repr(c)[1:-1] if category(c) in _STEERING and c not in "\t\n\u200c\u200d" else c
        for c in text
    )


def rewarded(outcome: Outcome) -> str:
    """A reward, or why there is none, with what is known besides."""
    found = (
        f"reward: {outcome.value:g}"
        if isinstance(outcome, Scored)
        else f"no reward: {outcome.kind}: {outcome.reason}"
    )
    flags = ", ".join(outcome.flags) if isinstance(outcome, Scored) else ""
    components = ", ".join(f"{name} {value:g}" for name, value in outcome.components.items())
    return "; ".join(
        filter(
            None, (found, components and f"components: {components}", flags and f"flags: {flags}")
        )
    )


def number(value: Any) -> str:
    """A figure in three digits; the first line of anything else."""
    return f"{value:.3g}" if isinstance(value, float) else str(value).partition("\n")[0]


def sampled(temperature: float) -> str:
    """How answers were drawn."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def quoted(records: Sequence[RolloutRecord], step: int, kept: int) -> Iterator[str]:
    """For each record a sentence with the last answer and what the reward said of it; then where
    the rest is, if it is kept.
    """
    for r in records:
        answer = next((turn.text for turn in reversed(r.turns) if turn.sampled), "")
        reward = f"no reward ({r.unscored})" if r.reward is None else f"reward {number(r.reward)}"
        flags = f" ({', '.join(r.flags)})" if r.flags else ""
        yield (
            f"{EXAMPLE}{r.task}, truth {short(r.truth, 200)}, was answered {short(answer, 200)}:"
            f" {reward}{flags}."
        )
    if records and kept:
        yield f"More in rollouts/step_{step:06d}.jsonl, which `python -m rayloop report` shows."


def _fields(record: Record) -> str:
    hidden = ("event", "step", "traceback")
    return f"{record['event']}: " + ", ".join(
        f"{key} {number(v)}" for key, v in record.items() if key not in hidden and v != ""
    )


def _evaluated(record: Record) -> str:
    """Means of the reward and its components; those by source, of controls and the bounds are left
    to the run folder.
    """
    means = {
        k.removeprefix("val/").removesuffix("/mean"): v
        for k, v in record.items()
        if fnmatch(k, "val/*/mean")
    }
    shown = ", ".join(
        f"{name} {v:.3f}"
        for name, v in means.items()
        if not fnmatch(name, "*/reward") and "control/" not in name
    )
    scored, drawn = record["val/scored"], record.get("val_sampled/scored", 0)
    missing = record["val/unscored"] + record.get("val_sampled/unscored", 0)
    parts = [f"held-out: {shown or 'no score'} over {scored:g} rows"]
    if drawn:
        parts.append(
            f"sampled reward {record['val_sampled/reward/mean']:.3f} over {drawn:g} answers"
        )
    if missing:
        parts.append(f"{missing:g} HAVE NO SCORE")
    best, when = record.get("val/best"), record.get("val/best_step", record["step"])
    before = (
        f" (best so far {best:.3f}, of step {when:g})"
        if best is not None and when < record["step"]
        else ""
    )
    return "; ".join(parts) + before


def gained(record: Record) -> list[str]:
    """A sentence for each kind of answer: what held-out tasks earned first, what they earn now, and
    whether that may be chance.
    """
    since = f" since step {record['since']}" if record["since"] else ""
    return [
        f"held-out reward, {drawn}: {_gain(pair)}{since}"
        for drawn, pair in record["rewards"].items()
    ]


def _gain(pair: Mapping[str, Any]) -> str:
    mean, low, high = pair["gain"]
    change = f"{pair['before']:.3f} -> {pair['after']:.3f}, gain {mean:.3f}"
    if low is None or high is None:
        return f"{change} ({pair['tasks']} tasks, too few for an interval)"
    if low == high == 0:
        return f"{change} (the same on each of {pair['tasks']} tasks)"
    chance = ": it may be chance" if low <= 0 <= high else ""
    return f"{change} (95 % interval {low:.3f} to {high:.3f} over {pair['tasks']} tasks{chance})"


_WORDS: dict[str, Callable[[Record], str]] = {
    "evaluated": _evaluated,
    "gain": lambda record: "\n".join(gained(record)),
    "controls": lambda record: "controls: " + "\n".join(table({**record, "sources": {}})),
}
