"""Each event of a run in plain words. The run folder has all of its fields."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import category

import jinja2

from rayloop.config.explain import short
from rayloop.core.files import yaml_data
from rayloop.core.groups import Outcome, Scored
from rayloop.measure.report import table
from rayloop.run.records.rollouts import RolloutRecord

Record = Mapping[str, Any]
_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode's characters that are written out.

Tabs, line breaks, and the joiners of scripts and emoji are not.
"""

TEMPLATES: dict[str, str] = yaml_data(Path(__file__).with_name("words.yaml"))
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
"""The beginning of the sentence that quotes an answer of a run that cannot continue."""


def doing(phase: str, progress: tuple[int, int] | None) -> str:
    """One short line on a phase; ``progress`` is (done, total)."""
    words = PHASES.get(phase, phase)
    return words if progress is None else f"{words} {progress[0]}/{progress[1]}"


def describe(record: Record) -> str:
    """One line for an event, a table for controls, tracebacks whole.

    An event without a template, or with the fields of another version, is shown with its fields.
    """
    kind = record["event"]
    try:
        if kind in TEMPLATES:
            sentence = _template(kind).render(record)
        else:
            sentence = _WORDS.get(kind, _fields)(record)
    except (KeyError, TypeError, ValueError, jinja2.UndefinedError):
        sentence = _fields(record)
    step = f"[{record['step']}] " if "step" in record else ""
    trace = f"\n{record['traceback']}" if "traceback" in record else ""
    return f"{step}{sentence}{trace}"


@cache
def _template(kind: str) -> jinja2.Template:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)  # lines of text, not of HTML
    environment.filters |= {"span": span, "number": number}
    return environment.from_string(TEMPLATES[kind])


def span(seconds: float) -> str:
    """A duration in a unit that is easy to read: ``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def visible(text: str) -> str:
    """The text with every character written out that would steer a terminal, as ``\\x1b``.

    These are control characters except tabs and line breaks, marks of direction, other separators
    of lines, and halves of surrogate pairs, which cannot be written to a terminal.
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    steers = category(character) in _STEERING and character not in "\t\n\u200c\u200d"
    return repr(character)[1:-1] if steers else character


def rewarded(outcome: Outcome) -> str:
    """A reward, or the reason for its absence, with components and flags."""
    flags = ""
    if isinstance(outcome, Scored):
        parts = [f"reward: {outcome.value:g}"]
        flags = ", ".join(outcome.flags)
    else:
        parts = [f"no reward: {outcome.kind}: {outcome.reason}"]
    components = ", ".join(f"{name} {value:g}" for name, value in outcome.components.items())
    if components:
        parts.append(f"components: {components}")
    if flags:
        parts.append(f"flags: {flags}")
    return "; ".join(parts)


def number(value: Any) -> str:
    """A figure in three digits; the first line of anything else."""
    return f"{value:.3g}" if isinstance(value, float) else str(value).partition("\n")[0]


def sampled(temperature: float) -> str:
    """The temperature of sampled answers, in words."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def quoted(records: Sequence[RolloutRecord], step: int, *, kept: bool) -> Iterator[str]:
    """A sentence for each record with its last answer and its reward.

    The last sentence names the file of all records, if they are kept.
    """
    for record in records:
        answer = next((turn.text for turn in reversed(record.turns) if turn.sampled), "")
        reward = f"reward {number(record.reward)}"
        if record.reward is None:
            reward = f"no reward ({record.unscored})"
        flags = f" ({', '.join(record.flags)})" if record.flags else ""
        yield (
            f"{EXAMPLE}{record.task}, truth {short(record.truth, 200)}, was answered"
            f" {short(answer, 200)}: {reward}{flags}."
        )
    if records and kept:
        yield f"More in rollouts/step_{step:06d}.jsonl, which `python -m rayloop report` shows."


def _fields(record: Record) -> str:
    hidden = ("event", "step", "traceback")
    fields = [
        f"{key} {number(value)}"
        for key, value in record.items()
        if key not in hidden and value != ""
    ]
    return f"{record['event']}: " + ", ".join(fields)


def _evaluated(record: Record) -> str:
    """Means of the reward and its components.

    The run folder has the means by source and of controls, and the bounds.
    """
    means = []
    for metric, value in record.items():
        if fnmatch(metric, "val/*/mean"):
            name = metric.removeprefix("val/").removesuffix("/mean")
            if not fnmatch(name, "*/reward") and "control/" not in name:
                means.append(f"{name} {value:.3f}")
    scores = ", ".join(means) or "no score"
    sampled_count = record.get("val_sampled/scored", 0)
    unscored_count = record["val/unscored"] + record.get("val_sampled/unscored", 0)
    parts = [f"held-out: {scores} over {record['val/scored']:g} rows"]
    if sampled_count:
        mean = record["val_sampled/reward/mean"]
        parts.append(f"sampled reward {mean:.3f} over {sampled_count:g} answers")
    if unscored_count:
        parts.append(f"{unscored_count:g} HAVE NO SCORE")
    best = record.get("val/best")
    best_step = record.get("val/best_step", record["step"])
    sentence = "; ".join(parts)
    if best is not None and best_step < record["step"]:
        sentence += f" (best so far {best:.3f}, of step {best_step:g})"
    return sentence


def gained(record: Record) -> list[str]:
    """A sentence for each kind of answer on the change of the held-out reward.

    It has the first and the present reward, and whether the gain may be chance.
    """
    since = f" since step {record['since']}" if record["since"] else ""
    return [
        f"held-out reward, {kind}: {_gain(pair)}{since}" for kind, pair in record["rewards"].items()
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
