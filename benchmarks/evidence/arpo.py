"""Does multi-turn GRPO learn in the live browser? recipes/arpo/quickstart.yaml as it is shipped, against random play.

    python -m benchmarks.evidence.arpo [--only SEED] [--note TEXT] [--out FILE] [key=value ...]

Three seeds, or the one of ``--only``; each is put into the file beside those that are there, with the hash of the configuration
that it ran and ``--note``, what else the machine did. For each: wall and CPU seconds of the command, success on the held-out seeds
by page before and after, sampled as in training and greedy, what was gained (paired by task), and once what random clicks earn on
the same tasks in as many turns. All with 95 % bootstrap intervals. Nine minutes a seed on two quiet cores, and one for random
play.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.evidence.seeds import digest, trained
from benchmarks.makers.random_clicks import ARM, play
from benchmarks.measure import machine
from rayloop.config.settings import load
from rayloop.measure.controls import RIGHT, SAMPLED, Item, gains
from rayloop.measure.intervals import Interval, interval
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items

CONFIG = Path("recipes/arpo/quickstart.yaml")
RUNS = Path("runs/evidence/arpo")
PICTURE = Path("docs/arpo.png")
SEEDS = (0, 1, 2)
CHANCES = 4
"""Episodes of random play for each task."""
PLACES = 4
"""Decimals that are kept."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Multi-turn GRPO in the live browser, by page, against random play.")
    parser.add_argument("--only", type=int, metavar="SEED", help="this seed alone")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the configuration")
    chosen = parser.parse_args()
    config = load(CONFIG, chosen.overrides, RunConfig)
    found = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {"seeds": {}}
    hashed = digest(config)
    if found.get("random", {}).get("tasks") != config.data.eval:
        found["random"] = {"tasks": config.data.eval, **chance(config)}
    for seed in SEEDS if chosen.only is None else [chosen.only]:
        about = {"config": hashed, "overrides": chosen.overrides, "note": chosen.note, "machine": machine()}
        spent = trained(CONFIG, RUNS / f"seed-{seed}", seed, chosen.overrides)
        found["seeds"][str(seed)] = about | spent | recorded(RunFolder.at(RUNS / f"seed-{seed}"))
        chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found)
    print("\n".join(markdown(found)))


def chance(config: RunConfig) -> dict[str, Any]:
    """What random clicks earn on the held-out tasks."""
    assert config.data.eval is not None
    rows = [json.loads(line) for line in Path(config.data.eval).read_text(encoding="utf-8").splitlines()]
    return by_page(play(rows, config.environment.episode.max_turns, CHANCES))


def recorded(folder: RunFolder) -> dict[str, Any]:
    """Success before and after, and what was gained, of a run folder."""
    files = list(folder.evaluations.files().values())
    before, after = (read_items(file) for file in (files[0], files[-1]))
    return {
        "steps": len(list(folder.metrics)),
        "arms": {
            arm: {
                "before": by_page(only(before, arm)),
                "after": by_page(only(after, arm)),
                "gain": {name: rounded(value) for name, value in gains(only(after, arm), only(before, arm)).items()},
            }
            for arm in (SAMPLED, RIGHT)
        },
    }


def only(items: Sequence[Item], arm: str) -> list[Item]:
    return [item for item in items if item.arm == arm]


def by_page(items: Sequence[Item]) -> dict[str, list[float | None]]:
    """Mean success of all tasks (``all``) and of each page's, with intervals over tasks."""
    pages = ["all", *sorted({item.source for item in items})]
    return {page: rounded(success([item for item in items if page in ("all", item.source)])) for page in pages}


def success(items: Sequence[Item]) -> Interval:
    """Over tasks: a task's episodes count as their mean. Unscored ones are left out."""
    tasks: dict[str, list[float]] = {}
    for item in items:
        if "success" in item.components:
            tasks.setdefault(item.task, []).append(item.components["success"])
    return interval([fmean(results) for results in tasks.values()])


def rounded(value: Interval) -> list[float | None]:
    return [None if number is None else round(number, PLACES) for number in value]


def draw(found: Mapping[str, Any]) -> None:
    """Success by page, sampled: random clicks as bars, and for each seed an arrow from before to after; intervals of ``all``."""
    from matplotlib.figure import Figure

    chance = {page: value for page, value in found["random"].items() if page != "tasks"}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.bar(range(len(chance)), [mean for mean, *_ in chance.values()], color="0.85", label="random clicks")
    for number, (seed, run) in enumerate(sorted(found["seeds"].items())):
        arm, aside = run["arms"][SAMPLED], 0.2 * (number - (len(found["seeds"]) - 1) / 2)
        for place, page in enumerate(chance):
            before, after = (arm[when][page] for when in ("before", "after"))
            axis.plot([place + aside] * 2, [before[0], after[0]], "-", color=f"C{number}")
            axis.plot(place + aside, before[0], "o", mfc="white", color=f"C{number}")
            axis.plot(place + aside, after[0], "o", color=f"C{number}", label="_" if place else f"seed {seed}")
            if page == "all" and after[1] is not None:
                axis.vlines(place + aside, *after[1:], color=f"C{number}", alpha=0.3, linewidth=5)
    axis.set_xticks(range(len(chance)), list(chance), rotation=30, ha="right")
    axis.set(ylabel="success on held-out seeds", ylim=(0, 1))
    axis.legend(title="open: before\nfull: after 40 steps")
    figure.savefig(PICTURE, dpi=100, metadata={"Software": None})


def markdown(found: dict[str, Any]) -> list[str]:
    """The tables of docs/results.md."""
    lines = [
        "| seed | s | CPU s | success, sampled | gain of reward | success, greedy | gain of reward |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed, run in sorted(found["seeds"].items()):
        cells = [seed, run["wall_s"], run["cpu_s"]]
        for arm in run["arms"].values():
            cells += [f"{arm['before']['all'][0]:.3f} -> {arm['after']['all'][0]:.3f}", spread(arm["gain"]["reward"])]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", f"| page | {ARM} | " + " | ".join(f"seed {seed}" for seed in sorted(found["seeds"])) + " |"]
    lines.append("|---" * (2 + len(found["seeds"])) + "|")
    for page, chances in found["random"].items():
        if page != "tasks":
            sampled = [found["seeds"][seed]["arms"][SAMPLED] for seed in sorted(found["seeds"])]
            runs = [f"{bounds(arm['before'][page])} -> {bounds(arm['after'][page])}" for arm in sampled]
            lines.append(f"| {page} | {bounds(chances)} | " + " | ".join(runs) + " |")
    return lines


def bounds(value: Sequence[float | None]) -> str:
    mean, low, high = value
    return f"{mean:.2f}" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def spread(value: Sequence[float | None]) -> str:
    mean, low, high = value
    return f"{mean:+.3f}" if low is None else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    main()
