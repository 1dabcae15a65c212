"""``python -m tools.pages.idle`` prints docs/idle_settings.md: the menu of losses,
corrections, terms, replay and filters, and the other settings with which each of its entries does
nothing. A test computes the gradients of each cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from rayloop.grpo.idle import Situation, idle
from rayloop.grpo.losses.settings import LossChoice, LossSettings
from rayloop.grpo.settings import AlgorithmSettings, UpdateSettings

HEADER = """# Settings that do nothing

Made by `python -m tools.pages.idle`; do not edit. A run says before it starts which settings
of its algorithm do nothing next to its others, with the reason, as events `warning`; so do `doctor
CONFIG` and, below the YAML, `train CONFIG --print-config`. A test computes the gradients of each
cell.

*acts*: the gradients differ from those without the entry. *nothing*: they are the same up to
rounding. Empty: the two exclude each other. *Exact engine*: `engine.kind: transformers` in float32,
without staleness.

"""

Changes = Mapping[str, Any]
"""Dotted keys below ``policy`` and ``algorithm`` -> values."""

SITUATIONS: dict[str, tuple[Changes, Situation]] = {
    "one update, `decoupled`": ({}, Situation()),
    "one update, `none`": ({"loss.correction": "none"}, Situation()),
    "one update, `bypass`": ({"loss.correction": "bypass"}, Situation()),
    "two updates": ({"update.mini_batches": 2}, Situation()),
    "exact engine, one update": ({}, Situation(exact=True)),
    "exact engine, two updates": ({"update.mini_batches": 2}, Situation(exact=True)),
    "`refresh_every: 1`, one update": ({}, Situation(refresh_every=1)),
    "`distill`": ({"algorithm.advantage": {"kind": "distill"}, "loss.kl_coef": 1.0}, Situation()),
}
"""The rest of a run, next to the entry: its other settings, and what else decides."""

MASK = {"action": "mask", "low": 0.5, "high": 1.5}
ENTRIES: dict[str, Changes] = {
    **{
        f"loss.kind: {kind}": {"loss.kind": kind}
        for kind in ("gspo", "cispo", "sapo", "dppo", "reinforce")
    },
    "loss.clip_low: 0.1": {"loss.clip_low": 0.1},
    "loss.clip_high: 0.28": {"loss.clip_high": 0.28},
    "loss.dual_clip: 2": {"loss.dual_clip": 2.0},
    "loss.dual_clip: null": {"loss.dual_clip": None},
    "loss: {kind: gspo, clip_high: 0.2}": {"loss.kind": "gspo", "loss.clip_high": 0.2},
    "loss: {kind: cispo, clip_high: 1}": {"loss.kind": "cispo", "loss.clip_high": 1.0},
    "loss: {kind: dppo, clip_low: 0.05}": {"loss.kind": "dppo", "loss.clip_low": 0.05},
    "loss.correction: none": {"loss.correction": "none"},
    "loss.correction: bypass": {"loss.correction": "bypass"},
    "loss: {kind: reinforce, correction: bypass}": {
        "loss.kind": "reinforce",
        "loss.correction": "bypass",
    },
    **{
        f"loss.correction: {{level: {level}, action: mask}}": {
            "loss.correction": {**MASK, "level": level}
        }
        for level in ("token", "sequence", "geometric")
    },
    "loss.correction: {level: sequence}": {"loss.correction": {"level": "sequence"}},
    "loss.correction: {veto: [0.2, 5]}": {"loss.correction": {"veto": [0.2, 5.0]}},
    "loss.correction: {off_policy: 0.1}": {"loss.correction": {"off_policy": 0.1}},
    "loss.kl: k2": {"loss.kl": "k2"},
    "loss: {kl: k2, kl_coef: 0.1}": {"loss.kl": "k2", "loss.kl_coef": 0.1},
    "loss.kl_coef: 0.1": {"loss.kl_coef": 0.1},
    "loss: {kl: k1, kl_coef: 0.1}": {"loss.kl": "k1", "loss.kl_coef": 0.1},
    "loss.entropy_coef: 0.01": {"loss.entropy_coef": 0.01},
    "loss.top_entropy_quantile: 0.2": {"loss.top_entropy_quantile": 0.2},
    "loss.aggregation: seq-mean-token-mean": {"loss.aggregation": "seq-mean-token-mean"},
    "replay.kind: corrected": {"algorithm.replay.kind": "corrected"},
    "filters: [equal_rewards]": {
        "algorithm.filtering.filters": [{"kind": "equal_rewards"}, {"kind": "overlong"}]
    },
    "filters: [positive_negative_advantage]": {
        "algorithm.filtering.filters": [{"kind": "positive_negative_advantage"}]
    },
}
"""The menu: how the page names an entry, and its settings."""

EXCLUDED = {
    ("loss.correction: none", "one update, `none`"),
    ("loss.correction: bypass", "one update, `bypass`"),
    *(
        (name, f"one update, `{how}`")
        for name in ENTRIES
        if "correction" in name
        for how in ("none", "bypass")
    ),
    *((name, f"one update, `{how}`") for name in ENTRIES if "dppo" in name for how in ("none",)),
    *(
        (name, situation)
        for name in ("replay.kind: corrected",)
        for situation in SITUATIONS
        if "exact" in situation
    ),
    *(
        (name, "`distill`")
        for name in ENTRIES
        for what in ("entropy_coef", "kl", "replay", "reinforce, ")
        if what in name
    ),
}
"""Entries that say themselves what the situation says, or that a run refuses there."""


def built(changes: Changes) -> tuple[LossSettings, AlgorithmSettings, UpdateSettings]:
    """The settings with these changes."""
    parts: dict[str, dict[str, Any]] = {"loss": {}, "algorithm": {}, "update": {}}
    for key, value in changes.items():
        part, *parents, last = key.split(".")
        place = parts[part]
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    loss: LossSettings = TypeAdapter(LossChoice).validate_python(parts["loss"])
    return (
        loss,
        AlgorithmSettings.model_validate(parts["algorithm"]),
        UpdateSettings.model_validate(parts["update"]),
    )


def cell(entry: str, situation: str) -> list[str] | None:
    """What a run says of the entry there; None where the two exclude each other."""
    if (entry, situation) in EXCLUDED:
        return None
    changes, facts = SITUATIONS[situation]
    loss, algorithm, update = built({**changes, **ENTRIES[entry]})
    before = idle(*built(changes), facts)
    return [said for said in idle(loss, algorithm, update, facts) if said not in before]


def idles(entry: str, said: list[str]) -> bool:
    """Whether a sentence is about what distinguishes the entry from ``baseline``."""
    without = baseline(entry)
    names = [
        key for key, value in ENTRIES[entry].items() if key not in without or without[key] != value
    ]
    return any(name in sentence.split(":")[0] for sentence in said for name in names)


def baseline(entry: str) -> Changes:
    """The settings that an entry is compared with: those of its loss, and for ``corrected`` what it
    corrects.
    """
    changes = ENTRIES[entry]
    if "algorithm.replay.kind" in changes:
        return {"algorithm.replay.kind": "on_policy"}
    if entry == "loss: {kind: reinforce, correction: bypass}":
        return {**changes, "loss.correction": "none"}
    return {key: value for key, value in changes.items() if key == "loss.kind" and len(changes) > 1}


def page() -> str:
    """docs/idle_settings.md."""
    lines = ["| entry | " + " | ".join(SITUATIONS) + " |", "|---" * (len(SITUATIONS) + 1) + "|"]
    sentences = dict[str, str]()
    for entry in ENTRIES:
        cells = []
        for situation in SITUATIONS:
            said = cell(entry, situation)
            cells.append("" if said is None else "nothing" if idles(entry, said) else "acts")
            sentences |= {
                why: one
                for one in said or ()
                if (why := one.partition(" here: ")[2]) not in sentences
            }
        lines.append(f"| `{entry}` | " + " | ".join(cells) + " |")
    return (
        HEADER
        + "\n".join(lines)
        + "\n\nEach reason, in one of its sentences:\n\n"
        + "".join(f"- {said}\n" for said in sentences.values())
    )


if __name__ == "__main__":
    print(page(), end="")
