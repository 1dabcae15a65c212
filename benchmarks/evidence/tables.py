"""The tables and pictures of docs/results.md, from what an experiment has recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.evidence.experiments import Experiment
from benchmarks.evidence.runs import KINDS, Record
from rayloop.measure.controls import WORDS

Value = Sequence[float | None]
"""Mean, lower and upper bound of a 95 % interval."""


def markdown(experiment: Experiment, found: Record) -> list[str]:
    """All tables that the records allow: runs, sources, controls, sets."""
    runs = [
        (seed, arm, run)
        for seed, by_arm in sorted(found["runs"].items())
        for arm, run in by_arm.items()
    ]
    tables = [
        _runs(experiment, runs, found["compared"]),
        _pooled(experiment, found.get("pooled", {})),
        _sources(experiment, runs, found),
        _controls(experiment, runs),
        _sets(runs),
    ]
    return "\n\n".join(
        "\n".join(table) for table in map(list, tables) if len(table) > 2
    ).splitlines()


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _head(*names: str) -> Iterator[str]:
    yield _row(names)
    yield "|---" * len(names) + "|"


def _runs(
    experiment: Experiment, runs: Sequence[tuple[str, str, Record]], compared: Record
) -> Iterator[str]:
    """Before and after with the gain; of an arm that is compared, its value there and the
    difference to the first arm.
    """
    columns = [f"{score}, {kind}" for score in experiment.shown for kind in KINDS.values()]
    yield from _head("seed", "arm", "s", "CPU s", "steps", "tokens", *columns)
    for seed, arm, run in runs:
        if "held_out" not in run:
            continue
        gap = compared.get(seed, {}).get(arm)
        step = gap["steps"][0] if gap else max(map(int, run["held_out"]))
        first, held = run["held_out"][min(run["held_out"], key=int)], run["held_out"][str(step)]
        cells = [seed, arm, run["wall_s"], run["cpu_s"], step, held["tokens"]]
        for score in experiment.shown:
            for name, kind in KINDS.items():
                before, after = (each["arms"].get(name, {}).get(score) for each in (first, held))
                change = (gap or run["gain"]).get(kind, {}).get(score)
                cells.append(
                    f"{before[0]:.3f} -> {after[0]:.3f} ({spread(change)})"
                    if before and after and change
                    else ""
                )
        yield _row(cells)


def _pooled(experiment: Experiment, pooled: Record) -> Iterator[str]:
    """Gains over all seeds, and differences to the first arm."""
    columns = [f"{score}, {kind}" for score in experiment.shown for kind in KINDS.values()]
    yield from _head("all seeds", "value", *columns)
    for arm, values in pooled.items():
        for name, by_kind in values.items():
            cells = [
                spread(by_kind[kind][score])
                for score in experiment.shown
                for kind in KINDS.values()
            ]
            yield _row([arm, name, *cells])


def _sources(
    experiment: Experiment, runs: Sequence[tuple[str, str, Record]], found: Record
) -> Iterator[str]:
    """The first score, sampled, by source: random clicks, and every run before and after."""
    if not experiment.by_source:
        return
    chance, score = found["start"].get("random", {}), experiment.shown[0]
    yield from _head("source", "random", *(f"{arm}, seed {seed}" for seed, arm, _ in runs))
    for source in next(iter(runs[0][2]["held_out"].values()))["by_source"]["sampled"]:
        pairs = [ends(run, source, score) for _, _, run in runs]
        cells = [f"{bounds(before)} -> {bounds(after)}" for before, after in pairs]
        yield _row([source, bounds(chance[source][score]) if source in chance else "", *cells])


def ends(run: Record, source: str, score: str) -> tuple[Value, Value]:
    """A score of one source, sampled, at the first and the last evaluation."""
    held = run["held_out"]
    first, last = (
        held[key(held, key=int)]["by_source"]["sampled"][source][score] for key in (min, max)
    )
    return first, last


def _controls(experiment: Experiment, runs: Sequence[tuple[str, str, Record]]) -> Iterator[str]:
    """What the right image, greedy, gains over each control, before and after."""
    score = experiment.shown[0]
    yield from _head("seed", "arm", "right image over", f"{score}, before", f"{score}, after")
    for seed, arm, run in runs:
        held = list(run.get("held_out", {}).values())
        for control in held[-1]["differences"] if held else ():
            cells = [
                spread(each["differences"][control][score])
                for each in (held[0], held[-1])
                if each["differences"]
            ]
            yield _row([seed, arm, WORDS[control], *cells])


def _sets(runs: Sequence[tuple[str, str, Record]]) -> Iterator[str]:
    """Scores and gains of each set that ``rayloop eval`` played."""
    yield from _head(
        "seed", "arm", "set", "scores", "gain over the start weights, greedy", "over controls"
    )
    for seed, arm, run in runs:
        for name, found in run.get("sets", {}).items():
            scores = ", ".join(
                f"{score} {value[0]:.3f}" for score, value in found["arms"]["right"].items()
            )
            gain = ", ".join(
                f"{score} {spread(value)}"
                for score, value in found["gain"].get("greedy", {}).items()
            )
            over = ", ".join(
                f"{control} {spread(by['reward'])}" for control, by in found["differences"].items()
            )
            yield _row([seed, arm, name, scores, gain, over])


def spread(value: Value) -> str:
    """A difference with its interval."""
    mean, low, high = value
    return f"{mean:+.3f}" if low is None else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def bounds(value: Value) -> str:
    """A mean with its interval."""
    mean, low, high = value
    return f"{mean:.2f}" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def draw(experiment: Experiment, found: Record) -> None:
    """Write the experiment's picture: scores by source as arrows, else scores over the steps, a
    colour for each seed or arm.
    """
    from matplotlib.figure import Figure

    if experiment.picture is None:
        return
    several = len(experiment.arms) > 1
    runs = [
        (arm if several else f"seed {seed}", run)
        for seed, by_arm in sorted(found["runs"].items())
        for arm, run in by_arm.items()
        if "held_out" in run
    ]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    if experiment.by_source:
        _draw_sources(
            figure.subplots(), experiment.shown[0], runs, found["start"].get("random", {})
        )
    else:
        axes: list[Any] = list(figure.subplots(1, len(experiment.shown), squeeze=False)[0])
        for axis, score in zip(axes, experiment.shown, strict=True):
            names = [*experiment.arms] if several else [name for name, _ in runs]
            _draw_steps(axis, score, experiment.curves[score], runs, names)
        axes[0].legend(title="line: training\npoint: held-out, sampled")
    figure.savefig(experiment.picture, dpi=100, metadata={"Software": None})


def _draw_steps(
    axis: Any, score: str, metric: str, runs: Sequence[tuple[str, Record]], names: Sequence[str]
) -> None:
    """Training's ``metric`` as lines, held-out rows, sampled where they are, as points; a colour
    for each of ``names``.
    """
    drawn = set[str]()
    for name, run in runs:
        colour = f"C{names.index(name)}"
        values = run["training"].get(metric, [])
        label = "_" if name in drawn else name
        axis.plot(range(1, len(values) + 1), values, color=colour, alpha=0.5, label=label)
        shown = {
            int(step): held["arms"].get("sampled", held["arms"]["right"])
            for step, held in run["held_out"].items()
        }
        points = {step: scores[score][0] for step, scores in shown.items()}
        axis.plot([*points], [*points.values()], "o", color=colour)
        drawn.add(name)
    axis.set(xlabel="step", ylabel=score, ylim=(0, None))


def _draw_sources(
    axis: Any, score: str, runs: Sequence[tuple[str, Record]], chance: Mapping[str, Any]
) -> None:
    """Random clicks as bars, and of each seed a line from before (open) to after (full); intervals
    of ``all``.
    """
    axis.bar(
        range(len(chance)),
        [by[score][0] for by in chance.values()],
        color="0.85",
        label="random clicks",
    )
    for number, (name, run) in enumerate(runs):
        aside = 0.2 * (number - (len(runs) - 1) / 2)
        for place, source in enumerate(chance):
            before, after = ends(run, source, score)
            axis.plot([place + aside] * 2, [before[0], after[0]], "-", color=f"C{number}")
            axis.plot(place + aside, before[0], "o", mfc="white", color=f"C{number}")
            axis.plot(
                place + aside, after[0], "o", color=f"C{number}", label="_" if place else name
            )
            if source == "all" and after[1] is not None:
                axis.vlines(place + aside, *after[1:], color=f"C{number}", alpha=0.3, linewidth=5)
    axis.set_xticks(range(len(chance)), list(chance), rotation=30, ha="right")
    axis.set(ylabel=f"{score}, held-out", ylim=(0, 1))
    axis.legend(title="open: before\nfull: after")
