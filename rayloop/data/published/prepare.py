"""Writes a published data set as JSONL with images: ``python -m rayloop data prepare NAME``."""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rayloop.config.settings import load
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.files import write_whole
from rayloop.core.types import derive
from rayloop.data.published.options import GENERIC, PrepareOptions, checked_options, options_parser
from rayloop.data.published.pictures import Pictures
from rayloop.data.published.source import ColumnMap, entries, folder, fractions, mapped, present
from rayloop.data.published.splits import REST, Row, assigned_splits

REASONS_SHOWN = 5
"""Reasons for rows left out that are named; the others are counted."""
_NAMES = re.compile(r"\S*[\\/.\d]\S*")


def main(name: str, maps: Mapping[str, Path], arguments: Sequence[str]) -> int:
    """Parse the options of ``data prepare NAME`` and write the data set.

    Returns exit code 0; raises ConfigError.
    """
    parsed = options_parser(name, __doc__).parse_args(arguments)
    column_map = load(parsed.map if name == GENERIC else maps[name], (), ColumnMap)
    options = checked_options(parsed, column_map)
    source = folder(column_map, parsed.local, parsed.hub)
    counts, failures = prepare(column_map, source, parsed.out, options)
    for split, count in counts.items():
        print(f"{parsed.out / f'{split}.jsonl'}: {count} rows")
    for line in reasons(failures):
        print(f"left out: {line}")
    return 0


def reasons(failures: Sequence[DataFailure]) -> list[str]:
    """Each reason with the number of its rows and the first of them, the most frequent first.

    Names and numbers in a reason do not count.
    """
    kinds: dict[str, list[DataFailure]] = defaultdict(list)
    for failure in failures:
        kinds[_NAMES.sub("", failure.reason)].append(failure)
    by_frequency = sorted(kinds.values(), key=len, reverse=True)
    lines = []
    for same in by_frequency[:REASONS_SHOWN]:
        plural = "s" if len(same) > 1 else ""
        lines.append(f"{len(same)} row{plural}, such as {same[0]}")
    others = by_frequency[REASONS_SHOWN:]
    if others:
        lines.append(f"{sum(map(len, others))} rows for {len(others)} other reasons")
    return lines


def prepare(
    how: ColumnMap, source: Path, out: Path, wanted: PrepareOptions = PrepareOptions()
) -> tuple[dict[str, int], list[DataFailure]]:
    """Write ``out/SPLIT.jsonl``, ``images`` and ``frames``.

    Returns the number of each split's rows, and the failures of the rows left out. Raises
    ConfigError.
    """
    splits = wanted.published or present(how, source)
    failures: list[DataFailure] = []
    light: list[tuple[str, Row]] = []
    for split, row in _all_rows(how, source, splits, wanted.where):
        if isinstance(row, DataFailure):
            failures.append(row)
        else:
            light.append((split, _without_pictures(row)))
    if not light:
        raise _no_row(source, failures, wanted.where)
    targets = iter(assigned_splits(how, light, wanted))
    finished: dict[str, list[Row]] = {}
    pictures = Pictures(out, source, how.image_folders, wanted.images, fps=wanted.fps)
    out.mkdir(parents=True, exist_ok=True)
    for _, row in _all_rows(how, source, splits, wanted.where):
        if isinstance(row, DataFailure):
            continue
        # The second reading gives the same rows in the same order, so that ``targets`` matches.
        target = next(targets)
        if target is None:
            continue
        try:
            finished_row = _finished(how, row, pictures)
        except DataFailure as failure:
            failures.append(failure)
        else:
            finished.setdefault(target, []).append(finished_row)
    if not finished:
        raise _no_row(source, failures)
    for split, rows in finished.items():
        if not wanted.original and split not in splits:
            random.Random(derive(wanted.seed, "order", split)).shuffle(rows)
        lines = [json.dumps(row, default=str) + "\n" for row in rows]
        write_whole(out / f"{split}.jsonl", "".join(lines).encode())
    names = sorted(finished, key=lambda split: split != REST)
    return {split: len(finished[split]) for split in names}, failures


def _all_rows(
    how: ColumnMap, source: Path, splits: Sequence[str], where: str
) -> Iterator[tuple[str, Row | DataFailure]]:
    for split in splits:
        for row in _rows(how, source, split, where):
            yield split, row


def _without_pictures(row: Row) -> Row:
    """The row for the choice of splits, which looks at all rows at once.

    All pictures of a data set would not fit into memory.
    """
    return {name: value for name, value in row.items() if name not in ("image", "videos")}


def _no_row(source: Path, failures: Sequence[DataFailure], where: str = "") -> ConfigError:
    explanation = "".join(f"\n    {line}" for line in reasons(failures))
    if not explanation:
        explanation = f": none has {where}" if where else ": its files are empty"
    return ConfigError(f"{source} has no row that can be used{explanation}")


def _rows(how: ColumnMap, source: Path, split: str, where: str) -> Iterator[Row | DataFailure]:
    """Our rows, each with ``@folder`` and ``@suffix`` of its file.

    ``where``: see ``PrepareOptions``.
    """
    column, _, value = where.partition("=")
    for entry in entries(how, source, split):
        if isinstance(entry, DataFailure):
            yield entry
            continue
        try:
            row = mapped(how, entry)
        except DataFailure as failure:
            yield failure
            continue
        if not where or str(row.get(column)) == value:
            yield {**row, "@folder": entry["@folder"], "@suffix": entry["@suffix"]}


def _finished(how: ColumnMap, row: Row, pictures: Pictures) -> Row:
    """The row with its image as a file, its box as fractions, and its videos as frames.

    Raises DataFailure.
    """
    where = str(row["id"])
    beside = str(row.pop("@folder"))
    suffix = row.pop("@suffix")
    if "image" in row:
        row["image"], width, height = pictures.keep(row["image"], beside, where)
        if "bbox" in row:
            kind = how.boxes[suffix] if isinstance(how.boxes, dict) else how.boxes
            row["bbox"] = fractions(row["bbox"], kind, width, height, where)
    if "videos" in row:
        row["videos"], rates = pictures.frames(row["videos"], beside, where)
        if any(rates):
            row["fps"] = rates[0] if len(set(rates)) == 1 else rates
    return row
