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
from rayloop.view.formatting import sampled
from rayloop.view.reader import by_step, gains, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = Mapping[str, Sequence[tuple[int, float | None]]]
"""Metric -> (step, value) pairs."""
CURVES = "curves.png"
NEXT = f"""wrote {{run}}/{CURVES}
next: python -m rayloop report {{run}}   # what it learned, its episodes before and after
      python -m rayloop console {{run}}   # the same in a browser, with search
      python -m rayloop export {{run}} {{run}}-exported   # for transformers and vLLM"""


def draw_or_emit(folder: RunFolder, emit: Callable[[str], None]) -> None:
    """Draw the curves at the end of a run.

    The run is done and saved, so that an error here is emitted and not raised.
    """
    try:
        curves(folder).savefig(folder.path / CURVES, dpi=120)
        emit(NEXT.format(run=folder.path))
    except Exception as error:
        emit(f"{CURVES} could not be drawn: {type(error).__name__}: {error}")


def curves(folder: RunFolder) -> Figure:
    """Training and held-out reward over the steps.

    Held-out rewards have 95 % intervals, and a dotted line at their first value.
    """
    config = folder.configuration
    sampling = (config.get("rollout") or {}).get("sampling") or {}
    temperature = sampling.get("temperature", 1.0)
    greedy = (config.get("evaluation") or {}).get("greedy", True)
    figure, axes = _axes([folder.path.name, *gains(folder.events)])
    training = series(folder.metrics).get("reward/mean", [])
    if training:
        label = f"training ({sampled(temperature)})"
        axes.plot(*_numbers(training), "-", color="0.6", linewidth=1, label=label)
    evaluations = series(by_step(folder.events, "evaluated"))
    _plot_held_out(axes, evaluations, "val_sampled", temperature)
    _plot_held_out(axes, evaluations, "val", 0.0 if greedy else temperature)
    if axes.lines:
        axes.legend()
    return figure


def _plot_held_out(axes: Axes, evaluations: Series, prefix: str, temperature: float) -> None:
    """Draw a held-out reward, its interval and its first value, if it was measured."""
    points = evaluations.get(f"{prefix}/reward/mean", [])
    if not points:
        return
    steps, means = _numbers(points)
    (line,) = axes.plot(steps, means, "o-", label=f"held-out ({sampled(temperature)})")
    _, low = _numbers(evaluations.get(f"{prefix}/reward/low", []))
    _, high = _numbers(evaluations.get(f"{prefix}/reward/high", []))
    if len(low) == len(high) == len(points):
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    axes.axhline(means[0], color=line.get_color(), linestyle=":", linewidth=1)


def overlaid(folders: Sequence[RunFolder]) -> Figure:
    """The training reward, thin, and the held-out reward of each run over the steps.

    The held-out reward is the sampled one if there is one, else the greedy one.
    """
    figure, axes = _axes(["held-out reward; thin: training reward"])
    for place, folder in enumerate(folders):
        color = f"C{place}"
        training = series(folder.metrics).get("reward/mean", [])
        evaluations = series(by_step(folder.events, "evaluated"))
        held_out = evaluations.get("val_sampled/reward/mean")
        if not held_out:
            held_out = evaluations.get("val/reward/mean", [])
        axes.plot(*_numbers(training), "-", color=color, linewidth=0.7, alpha=0.6)
        axes.plot(*_numbers(held_out), "o-", color=color, label=folder.path.name)
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
    """Steps and values; a value that was not finite leaves a gap."""
    steps = [step for step, _ in points]
    values = [float("nan") if value is None else value for _, value in points]
    return steps, values


Colours = Literal["true", "256"]


def colours(environment: Mapping[str, str], terminal: bool) -> Colours | None:
    """The colours that a terminal shows, by the environment's variables; None for none.

    https://no-color.org is respected.
    """
    kind = environment.get("TERM", "")
    if not terminal or environment.get("NO_COLOR") or kind in ("", "dumb"):
        return None
    if environment.get("COLORTERM") in ("truecolor", "24bit") or kind.endswith("-direct"):
        return "true"
    return "256" if "256" in kind else None


def blocks(picture: Image.Image, columns: int, kind: Colours = "true") -> str:
    """The picture as lines of text, at most ``columns`` characters wide.

    A character holds two pixels, one above the other.
    """
    width = max(1, min(columns, picture.width))
    height = max(2, 2 * round(picture.height * width / picture.width / 2))
    pixels = np.asarray(picture.convert("RGB").resize((width, height), Image.Resampling.BOX))
    system = ColorSystem.TRUECOLOR if kind == "true" else ColorSystem.EIGHT_BIT
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        colours_above = map(Color.from_rgb, *upper.T)
        colours_below = map(Color.from_rgb, *lower.T)
        pairs = zip(colours_above, colours_below, strict=True)
        styles = (Style(color=above, bgcolor=below) for above, below in pairs)
        # Equal neighbours become one run, which needs one pair of escape sequences.
        runs = [(style, len(list(same))) for style, same in groupby(styles)]
        lines.append(
            "".join(style.render("▀" * length, color_system=system) for style, length in runs)
        )
    return "\n".join(lines)
