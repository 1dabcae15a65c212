"""The result of a check: a finding, and its remedy."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    ``error``: a run would fail. ``warning``: it would be slow, exposed to others, or untested.
    """

    level: Level
    found: str
    remedy: str = ""
    """What to do; empty if and only if the level is ok."""

    def __post_init__(self) -> None:
        if (self.level == "ok") == bool(self.remedy):
            raise ValueError(
                f"{self}: a warning or an error needs a remedy, and nothing else has one"
            )


def size(count: float) -> str:
    """A readable number of bytes: 512 B, 16 MiB, 1.5 GiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.3g} {units[0]}" if count < 100 else f"{count:.0f} {units[0]}"
