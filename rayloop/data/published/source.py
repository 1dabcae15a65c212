"""Reads a published data set from a folder or the Hugging Face Hub.

A YAML file (``ColumnMap``) maps its columns to ours.
"""

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.data.rows import parsed, rows

Where = str | tuple[str, ...]
_PLACE = re.compile(r"\{([^{}]+)\}")


class NewSplit(SettingsModel):
    """A split that the publisher does not have, cut from the published ones."""

    share: float = Field(gt=0, lt=1)
    """Share of the rows that the split gets, rounded down.

    The rows that no split takes are ``train``.
    """
    most: int | None = Field(None, ge=1)
    """Rows at most, for a split whose size need not grow with the data."""


Boxes = Literal["fractions", "pixels", "pixels_and_size"]


class ColumnMap(SettingsModel):
    """Where a data set is, and which of its columns are ours.

    A column is ``a``, ``a.b`` (a key or list index in ``a``), or a text with names in braces; of
    several the first that a row has counts. ``@split``, ``@file`` (without suffix) and ``@index``
    are columns too.
    """

    hub: str = ""
    """Name on the Hugging Face Hub (owner/name).

    Empty: no name on the Hub is known, and ``--from`` is needed.
    """
    files: dict[str, tuple[str, ...]]
    """Published split -> patterns of its files (parquet, JSONL, JSON list or a row, TSV, CSV).

    The first pattern that matches files counts.
    """
    rows_at: str = ""
    """In JSON files: the key of the list of rows, when the file is an object."""
    each: str = ""
    """A column with a list whose entries become rows, such as the questions on one image."""
    columns: dict[str, Where]
    """Our column -> theirs.

    A row without one of them is left out; ``image`` becomes a file. The default ``id`` is
    split-index.
    """
    optional: dict[str, Where] = {}
    """The same for columns that a row may lack."""
    fixed: dict[str, Any] = {}
    """Our column -> a value that all rows have, such as ``data_source``."""
    values: dict[str, dict[str, Any]] = {}
    """Our column -> their value (as text) -> ours, for labels that are numbers or abbreviations.

    Others stay as they are.
    """
    closed: tuple[str, ...] = ()
    """Our columns of ``values`` that have no others: a row with one is left out."""
    image_folders: tuple[str, ...] = (".",)
    """Folders that image paths are relative to, tried in turn.

    They are below the data set's folder, or next to the row's file.
    """
    archives: tuple[str, ...] = ()
    """Patterns of further files that the Hub must deliver: folders of images."""
    boxes: Boxes | dict[str, Boxes] = "fractions"
    """The form of the column ``bbox``.

    Corners as fractions or in pixels, or a corner in pixels with width and height. By the suffix of
    the row's file (``.json``) where one data set is published in several forms.
    """
    stratify: tuple[str, ...] = ()
    """Our columns whose values every new split, and every sample, has in the same shares."""
    together: str = ""
    """Our column whose value no two new splits share.

    Rows about the same image belong in the same split.
    """
    make: dict[str, NewSplit] = {}
    """New splits, cut from all published rows, for data sets that lack one.

    Empty: the published splits stay.
    """
    sample: int | None = Field(None, ge=1)
    """Rows of each split that are drawn without ``--max-samples``.

    It is set where the published figure is that of a sample.
    """


def expanded(row: Mapping[str, Any], each: str) -> Iterator[Mapping[str, Any]]:
    """The row itself; with ``each`` one row for every entry of that column.

    Such a row has the entry in place of the list.
    """
    if not each:
        yield row
        return
    values = value_at(row, each)
    for value in values if isinstance(values, list | tuple) else ():
        yield {**row, each: value}


def mapped(how: ColumnMap, row: Mapping[str, Any]) -> dict[str, Any]:
    """Our row, with the image as the publisher stores it.

    Raises DataFailure for a column that is missing, null or blank.
    """
    result: dict[str, Any] = dict(how.fixed)
    place = f"{row['@file']}, row {row['@index']}"
    for column, source in (how.columns | how.optional).items():
        value = first(row, source)
        if value is not None:
            labels = how.values.get(column, {})
            result[column] = labels.get(str(value), value)
            if column in how.closed and result[column] not in labels.values():
                words = ", ".join(dict.fromkeys(map(str, (*labels, *labels.values()))))
                raise DataFailure(place, f"{column} {value!r:.100} is not one of {words}")
        elif column in how.columns:
            names = " or ".join((source,) if isinstance(source, str) else source)
            present = ", ".join(name for name in list(row)[:20] if not name.startswith("@"))
            raise DataFailure(place, f"no {names} for {column!r}; the row has {present}")
    result.setdefault("id", f"{row['@split']}-{row['@index']}")
    return result


def first(row: Mapping[str, Any], where: Where) -> Any:
    """The first of the named columns that the row has, not null and not blank; else None."""
    for template in (where,) if isinstance(where, str) else where:
        value = _column_or_text(row, template)
        if value is not None and value != [] and str(value).strip():
            return value
    return None


def _column_or_text(row: Mapping[str, Any], where: str) -> Any:
    """The value of a column, or a text with the values of the columns in braces."""
    if "{" not in where:
        return value_at(row, where)
    values = {name: value_at(row, name) for name in _PLACE.findall(where)}
    if any(value is None for value in values.values()):
        return None
    return _PLACE.sub(lambda match: str(values[match[1]]), where)


def value_at(row: Any, path: str) -> Any:
    """The value at ``a`` or ``a.b``; None where it is missing.

    The path may also be the name of a column, dots included.
    """
    if isinstance(row, Mapping) and path in row:
        return row[path]
    name, _, rest = path.partition(".")
    if isinstance(row, Mapping):
        value = row.get(name)
    elif isinstance(row, list | tuple) and _is_index(name, len(row)):
        value = row[int(name)]
    else:
        return None
    return value_at(parsed(value), rest) if rest else value


def _is_index(text: str, length: int) -> bool:
    """Whether the text is an index, perhaps negative, of a list of this length."""
    return re.fullmatch(r"-?\d+", text) is not None and -length <= int(text) < length


_MAX_FIELD_CHARACTERS = 2**31 - 1
"""Characters of a table's field: HR-Bench's tables hold whole images as base64."""


def folder(how: ColumnMap, local: Path | None, hub: str) -> Path:
    """The data set's folder: ``local``, or the one in the Hub's cache that ``hub`` is loaded into.

    Raises ConfigError.
    """
    if local is not None:
        if not local.is_dir():
            raise ConfigError(f"--from {local} is not a folder (seen from {Path.cwd()})")
        return local
    name = hub or how.hub
    if not name:
        raise ConfigError(
            "this data set has no known name on the Hub: download it, and name its folder with"
            " --from FOLDER"
        )
    patterns = [*chain.from_iterable(how.files.values()), *how.archives]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    # No network, no such data set, no permission: the Hub has many classes for them, which change.
    except Exception as error:
        includes = " ".join(f'--include "{pattern}"' for pattern in patterns)
        raise ConfigError(
            f"the Hub did not give {name}: {type(error).__name__}: {str(error)[:300]}. On a machine"
            f" that reaches it, run\n    hf download {name} --repo-type dataset --local-dir FOLDER"
            f" {includes}\nthen name that folder with --from FOLDER"
        ) from error


def files(how: ColumnMap, root: Path, split: str) -> list[Path]:
    """The files of a published split, sorted. Raises ConfigError when no pattern finds one."""
    for pattern in how.files[split]:
        matches = sorted(path for path in root.glob(pattern) if path.is_file())
        if matches:
            return matches
    raise ConfigError(
        f"{root} has no files of the split {split}: none matches {' or '.join(how.files[split])}"
    )


def present(how: ColumnMap, root: Path) -> tuple[str, ...]:
    """The published splits that have files. Raises ConfigError when none has."""
    splits = [split for split, patterns in how.files.items() if _any_matches(root, patterns)]
    if not splits:
        expected = [f"{split}: {' or '.join(patterns)}" for split, patterns in how.files.items()]
        lines = "\n    ".join(expected)
        raise ConfigError(f"{root} has none of the data set's files:\n    {lines}")
    return tuple(splits)


def _any_matches(root: Path, patterns: Iterable[str]) -> bool:
    return any(next(root.glob(pattern), None) for pattern in patterns)


def entries(how: ColumnMap, root: Path, split: str) -> Iterator[Mapping[str, Any] | DataFailure]:
    """The rows of a published split, with a DataFailure for each bad line.

    A row has the columns ``@split``, ``@file``, ``@suffix``, ``@index`` and ``@folder`` too.
    """
    index = 0
    for path in files(how, root, split):
        for row in _rows(path, how.rows_at):
            if isinstance(row, DataFailure):
                yield row
                continue
            if not isinstance(row, Mapping):
                yield DataFailure(str(path), f"expected an object, found {type(row).__name__}")
                continue
            for expanded_row in expanded(row, how.each):
                yield {
                    **expanded_row,
                    "@split": split,
                    "@file": path.stem,
                    "@suffix": path.suffix,
                    "@index": index,
                    "@folder": str(path.parent),
                }
                index += 1


def _rows(path: Path, rows_at: str) -> Iterator[Any]:
    if path.suffix in (".tsv", ".csv"):
        # A C long has 32 bits on Windows, where a larger limit raises OverflowError.
        csv.field_size_limit(min(_MAX_FIELD_CHARACTERS, sys.maxsize))
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
    elif path.suffix == ".json":
        yield from _listed(path, rows_at)
    else:
        yield from (row for _, row in rows(path))


def _listed(path: Path, rows_at: str) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if rows_at and isinstance(value, Mapping):
        value = value_at(value, rows_at)
    if isinstance(value, Mapping):
        value = _rows_of_object(value)
    if not isinstance(value, list):
        place = f" under {rows_at!r}" if rows_at else ""
        raise ConfigError(f"{path} holds no list of rows{place}")
    return value


def _rows_of_object(value: Mapping[str, Any]) -> list[Any]:
    """The rows of an object, each with its ``key``; an object without objects is a row itself."""
    if value and not any(isinstance(row, Mapping) for row in value.values()):
        return [value]
    return [{"key": key, **row} if isinstance(row, Mapping) else row for key, row in value.items()]


def fractions(box: Any, kind: Boxes, width: int, height: int, where: str) -> list[float]:
    """Corners [x1, y1, x2, y2] as fractions of the image; ``kind``: see ``ColumnMap.boxes``.

    Raises DataFailure for a box that is not within the image.
    """
    try:
        x1, y1, x2, y2 = map(float, () if isinstance(box, str) else box)
    except (TypeError, ValueError) as error:
        raise DataFailure(where, f"a box has four numbers, not {box!r:.100}") from error
    if kind == "pixels_and_size":
        x2 += x1
        y2 += y1
    if kind != "fractions":
        x1 /= width
        x2 /= width
        y1 /= height
        y2 /= height
    if 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1:
        return [x1, y1, x2, y2]
    reason = f"lies outside the image of {width} x {height} pixels"
    if x1 == x2 or y1 == y2:
        reason = "has no width or no height"
    elif kind == "fractions" and max(x1, y1, x2, y2) > 1:
        reason = "has values above one, so it is in pixels: say so in the map (boxes)"
    elif x1 > x2 or y1 > y2:
        reason = "has its corners reversed"
    raise DataFailure(where, f"the box {box} ({kind}) {reason}")
