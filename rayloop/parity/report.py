"""A comparison as a table, as one JSON object, and as sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayloop.config.model import Dtype
from rayloop.measure.parity import Agreement, Row

ENGINES = ("transformers", "vllm", "sglang")
"""The engines that are started here."""
HEADINGS = (
    "turn",
    "images",
    "depth",
    "tokens",
    "mean",
    "largest",
    "k3",
    "outside",
    "wrong img",
    "greedy",
    "theirs",
)


@dataclass(frozen=True)
class EngineOrigin:
    """Where the engine's log-probs are from.

    ``attention``: the engine's kernel, or "" where it does not say.
    """

    model: str
    engine: str
    versions: Mapping[str, str]
    attention: str
    dtype: Dtype


@dataclass(frozen=True)
class ParityReport:
    """A comparison: what was compared, its rows and what they say. All of it is plain JSON.

    ``total``: the row of all tokens. ``limit`` holds for a row's mean |difference|. ``notes``: what
    was left out, and why. ``seconds`` by part of the work.
    """

    origin: EngineOrigin
    family: str
    device: str
    trainer_attention: str
    limit: float
    rows: Sequence[Row]
    total: Row
    agreement: Agreement
    seconds: Mapping[str, float]
    notes: Sequence[str]


def lines(report: ParityReport) -> list[str]:
    """The table and the verdict, for a terminal."""
    origin = report.origin
    packages = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    result = [
        f"{origin.model} ({report.family}): {origin.engine} and the trainer, {origin.dtype} on"
        f" {report.device}",
        f"{packages}; attention {origin.attention or 'unknown'} and {report.trainer_attention}",
        _line("", HEADINGS),
    ]
    for row in report.rows:
        mark = "*" if row.failing(report.limit) else ""
        result.append(_line(f"{row.axis}{mark}", _cells(row)))
    seconds = ", ".join(f"{name} {number:.1f} s" for name, number in report.seconds.items())
    result += [f"limit of a mean: {report.limit:g} nats (*: above it); {seconds}", *report.notes]
    blind = ", ".join(f"{row.axis} {row.images}" for row in report.agreement.blind)
    if blind:
        result.append(
            f"the model is blind: other images change nothing, agreement proves nothing: {blind}"
        )
    return [*result, f"{origin.model}: {report.agreement.sentence}"]


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<8}" + "".join(f"{cell:>10}" for cell in cells)


def _cells(row: Row) -> list[str]:
    return [
        *(str(number) for number in (row.turn, row.images, row.depth, row.gap.tokens)),
        *(f"{number:.1e}" for number in (row.gap.mean, row.gap.largest, row.gap.k3)),
        f"{row.gap.outside:.0%}",
        "-" if row.wrong_images is None else f"{row.wrong_images:.2g}",
        f"{row.other_choices}/{row.greedy_tokens}",
        "-" if row.theirs is None else f"{row.theirs.mean:.1e}",
    ]
