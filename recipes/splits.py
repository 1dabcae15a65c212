"""How the recipes write the rows that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(out: Path, split: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write ``out/SPLIT.jsonl`` and print how many rows it has. Returns the file."""
    file = out / f"{split}.jsonl"
    lines = [json.dumps(row) + "\n" for row in rows]
    out.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{file}: {len(lines)} rows")
    return file
