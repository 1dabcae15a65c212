"""Draws ``curves.png`` at the end of a run, and pictures in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image
from rich.color import Color, ColorSystem
from rich.style import Style

from rayloop.run.folder import RunFolder
from rayloop.view.reader import by_step, series
from rayloop.view.words import gained, sampled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = "curves.png"
NEXT = f"""wrote {{run}}/{CURVES}
next: python -m rayloop report {{run}}   # what it learned, its episodes before and after
      python -m rayloop console {{run}}   # the same in a browser, with search
      python -m rayloop export {{run}} {{run}}-exported   # for transformers and vLLM"""


def draw_or_emit(folder: RunFolder, emit: Callable[[str], None]) -> None:
    """Draw at the end of a run, which is done and saved: an error here is emitted, and fails
    nothing.
    """
    try:
        curves(folder).savefig(folder.path / CURVES, dpi=120)
        emit(NEXT.format(run=folder.path))
    except Exception as error:
        emit(f"{CURVES} could not be drawn: {type(error).__name__}: {error}")


def curves(folder: RunFolder) -> Figure:
    """Training and held-out reward over the steps; held-out with 95 % intervals, and dotted where
    each of them began.
    """
    config, evaluations = folder.configuration, series(by_step(folder.events, "evaluated").values())
    sampling = (config.get("rollout") or {}).get("sampling") or {}
    drawn, greedy = (
        sampling.get("temperature", 1.0),
        (config.get("evaluation") or {}).get("greedy", True),
    )
    figure, axes = _axes(
        [
            folder.path.name,
            *(line for end in by_step(folder.events, "gain").values() for line in gained(end)),
        ]
    )
    if training := series(folder.metrics).get("reward/mean", []):
        axes.plot(
            *_numbers(training), "-", color="0.6", linewidth=1, label=f"training ({sampled(drawn)})"
        )
    for prefix, temperature in (("val_sampled", drawn), ("val", 0.0 if greedy else drawn)):
        if points := evaluations.get(f"{prefix}/reward/mean", []):
            (line,) = axes.plot(*_numbers(points), "o-", label=f"held-out ({sampled(temperature)})")
            low, high = (
                _numbers(evaluations.get(f"{prefix}/reward/{bound}", []))[1]
                for bound in ("low", "high")
            )
            if len(low) == len(high) == len(points):
                axes.fill_between(
                    _numbers(points)[0], low, high, color=line.get_color(), alpha=0.15
                )
            axes.axhline(_numbers(points)[1][0], color=line.get_color(), linestyle=":", linewidth=1)
    if axes.lines:
        axes.legend()
    return figure


def overlaid(folders: Sequence[RunFolder]) -> Figure:
    """Of each run the training reward, thin, and the held-out reward (sampled if there is one, else
    greedy) over the steps.
    """
    figure, axes = _axes(["held-out reward; thin: training reward"])
    for place, folder in enumerate(folders):
        training, evaluations = (
            series(folder.metrics),
            series(by_step(folder.events, "evaluated").values()),
        )
        held_out = evaluations.get("val_sampled/reward/mean") or evaluations.get(
            "val/reward/mean", []
        )
        axes.plot(
            *_numbers(training.get("reward/mean", [])),
            "-",
            color=f"C{place}",
            linewidth=0.7,
            alpha=0.6,
        )
        axes.plot(*_numbers(held_out), "o-", color=f"C{place}", label=folder.path.name)
    axes.legend()
    return figure


def _axes(title: Sequence[str]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title("\n".join(title), fontsize=8)
    axes.set(xlabel="step", ylabel="mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    return figure, axes


def _numbers(points: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Steps and values; what was not finite leaves a gap."""
    return [step for step, _ in points], [
        float("nan") if value is None else value for _, value in points
    ]


Colours = Literal["true", "256"]


def colours(environment: Mapping[str, str], terminal: bool) -> Colours | None:
    """The colours that a terminal shows, from the environment's variables (https://no-color.org
    too); None for none.
    """
    kind = environment.get("TERM", "")
    if not terminal or environment.get("NO_COLOR") or kind in ("", "dumb"):
        return None
    if environment.get("COLORTERM") in ("truecolor", "24bit") or kind.endswith("-direct"):
        return "true"
    return "256" if "256" in kind else None


def blocks(picture: Image.Image, columns: int, kind: Colours = "true") -> str:
    """The picture as lines of text, at most ``columns`` characters wide; a character holds two
    pixels, one above the other.
    """
    width = max(1, min(columns, picture.width))
    height = max(2, 2 * round(picture.height * width / picture.width / 2))
    pixels = np.asarray(picture.convert("RGB").resize((width, height), Image.Resampling.BOX))
    system = ColorSystem.TRUECOLOR if kind == "true" else ColorSystem.EIGHT_BIT
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        both = zip(map(Color.from_rgb, *upper.T), map(Color.from_rgb, *lower.T), strict=True)
        cells = groupby(Style(color=above, bgcolor=below) for above, below in both)
        lines.append(
            "".join(style.render("▀" * len([*same]), color_system=system) for style, same in cells)
        )
    return "\n".join(lines)
