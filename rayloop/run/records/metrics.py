"""The table of all metrics, ``metrics.yaml``, and their names for Prometheus.

docs/metrics.md is made from the table.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rayloop.core.files import yaml_data


@dataclass(frozen=True)
class Metric:
    """``unit`` "1" is a plain number or a fraction."""

    name: str
    unit: str
    meaning: str

    @property
    def prometheus(self) -> str:
        """The name for Prometheus.

        ``val/<source>/reward/mean`` is ``rayloop_val_reward_mean``, and ``source`` a label.
        """
        return re.sub(r"[^A-Za-z0-9]+", "_", "rayloop/" + _PART.sub("", self.name)).strip("_")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels: ``source`` of ``val/<source>/reward/mean``."""
        return tuple(_PART.findall(self.name))


_PART = re.compile(r"<(\w+)>")

TABLE = Path(__file__).with_name("metrics.yaml")
METRICS = tuple(Metric(name, *row) for name, row in yaml_data(TABLE).items())


def validate(names: Iterable[str]) -> tuple[str, ...]:
    """The names that are not in the table, in order."""
    return tuple(
        name
        for name in names
        if not any(pattern.fullmatch(name) for pattern in _patterns().values())
    )


def prometheus(name: str) -> tuple[Metric, dict[str, str]]:
    """The row of a metric, and its labels.

    The labels are all that metrics of the same Prometheus name have, "" for those this one lacks.
    Of several rows that fit, the one with the longest fixed text counts. A name that is not in the
    table is its own row.
    """
    row = Metric(name, "1", "")
    labels: dict[str, str] = {}
    longest = -1
    for candidate, pattern in _patterns().items():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        fixed_text = len(_PART.sub("", candidate.name))
        if fixed_text > longest:
            row = candidate
            labels = match.groupdict()
            longest = fixed_text
    names: set[str] = set()
    for metric in METRICS:
        if metric.prometheus == row.prometheus:
            names.update(metric.labels)
    return row, {label: labels.get(label, "") for label in sorted(names)}


@cache
def _patterns() -> dict[Metric, re.Pattern[str]]:
    return {m: re.compile(re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.escape(m.name))) for m in METRICS}
