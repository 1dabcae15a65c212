"""What each lost node cost, as measured: printed at the end of the session, and written into
docs/reliability.md when asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.runs import ROOT

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- node matrix: begin -->", "<!-- node matrix: end -->"
WRITE = "RAYLOOP_NODE_MATRIX"
"""Environment variable: set, the page is written."""


@dataclass(frozen=True)
class Cell:
    """One node lost: what was on it, when, seconds from the kill until all of it served again,
    payloads that went along.
    """

    carried: str
    phase: str
    seconds: float
    payloads: int


CELLS: list[Cell] = []


def record(carried: str, phase: str, seconds: float, events: Sequence[Mapping[str, Any]]) -> None:
    """Add a cell, from the events since the loss."""
    lost = sum(len(e["trajectories"]) for e in events if e["event"] == "payload_lost")
    CELLS.append(Cell(carried, phase, round(seconds, 1), lost))


def lines() -> list[str]:
    """The table as Markdown: a row for what was on the node, a column for the phase in which it was
    lost.
    """
    phases = list(dict.fromkeys(cell.phase for cell in CELLS))
    rows = ["| on the node | " + " | ".join(phases) + " |", "|---" * (len(phases) + 1) + "|"]
    for carried in dict.fromkeys(cell.carried for cell in CELLS):
        found = {cell.phase: cell for cell in CELLS if cell.carried == carried}
        rows.append(
            f"| {carried} | " + " | ".join(_worded(found.get(phase)) for phase in phases) + " |"
        )
    return rows


def _worded(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{cell.seconds:.1f}" + (f" ({cell.payloads} payloads)" if cell.payloads else "")


def write(page: Path = PAGE) -> None:
    """Between the markers of the page, when ``RAYLOOP_NODE_MATRIX`` is set."""
    if os.environ.get(WRITE):
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(
            "\n".join([before + BEGIN, "", *lines(), "", END + after]), encoding="utf-8"
        )
