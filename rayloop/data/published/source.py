"""Reads a published data set from a folder or the Hugging Face Hub; a YAML file (``ColumnMap``)
maps its columns to ours.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.data.rows import parsed, rows

Where = str | tuple[str, ...]
_PLACE = re.compile(r"\{([^{}]+)\}")


class NewSplit(SettingsModel):
    """A split that the publisher does not have, cut from those that there are."""

    share: float = Field(gt=0, lt=1)
    """Share of the rows that go into it, rounded down. What no split takes is ``train``."""
    most: int | None = Field(None, ge=1)
    """Rows at most, for a split whose size need not grow with the data."""


Boxes = Literal["fractions", "pixels", "pixels_and_size"]


class ColumnMap(SettingsModel):
    """Where a data set is, and its columns: ``a``, ``a.b`` (a key or list index in ``a``), or a
    text with names in braces; the first that a row has counts. ``@split``, ``@file`` (without
    suffix) and ``@index`` are columns too.
    """

    hub: str = ""
    """Name on the Hugging Face Hub (owner/name).

    Empty: it is not there, or nobody has looked, and ``--from`` is needed.
    """
    files: dict[str, tuple[str, ...]]
    """Published split -> patterns of its files (parquet, JSONL, JSON list or a row, TSV, CSV); the
    first that finds some counts.
    """
    rows_at: str = ""
    """In JSON files: the key of the list of rows, when the file is an object."""
    each: str = ""
    """A column with a list whose entries are rows of their own, such as the questions about one
    image.
    """
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
    """Folders that image paths are relative to, tried in turn: below the data set's, and beside the
    row's file.
    """
    archives: tuple[str, ...] = ()
    """What else of the Hub is needed besides ``files``, as patterns: folders of images."""
    boxes: Boxes | dict[str, Boxes] = "fractions"
    """What is in the column ``bbox``: corners as fractions or in pixels, or a corner in pixels with
    width and height. By the suffix of the row's file (``.json``) where one data set is published in
    several forms.
    """
    stratify: tuple[str, ...] = ()
    """Our columns whose values every new split, and every sample, has in the same shares."""
    together: str = ""
    """Our column whose value no two new splits share: rows about the same image belong into the
    same split.
    """
    make: dict[str, NewSplit] = {}
    """New splits, cut from all published rows, for data sets that lack one.

    Empty: the published splits stay.
    """
    sample: int | None = Field(None, ge=1)
    """Rows of each split that are drawn when ``--max-samples`` says nothing, where the published
    figure is of a sample.
    """


def expanded(row: Mapping[str, Any], each: str) -> Iterator[Mapping[str, Any]]:
    """The row itself; with ``each`` one row for every entry of that column, which has the entry in
    place of the list.
    """
    if not each:
        yield row
        return
    entries = found(row, each)
    for entry in entries if isinstance(entries, list | tuple) else ():
        yield {**row, each: entry}


def mapped(how: ColumnMap, row: Mapping[str, Any]) -> dict[str, Any]:
    """Our row, its image still theirs.

    Raises DataFailure for a column that is missing, null or blank.
    """
    made: dict[str, Any] = dict(how.fixed)
    for ours, theirs in (how.columns | how.optional).items():
        value = first(row, theirs)
        if value is not None:
            known = how.values.get(ours, {})
            made[ours] = known.get(str(value), value)
            if ours in how.closed and made[ours] not in known.values():
                words = ", ".join(dict.fromkeys(map(str, (*known, *known.values()))))
                raise DataFailure(
                    f"{row['@file']}, row {row['@index']}",
                    f"{ours} {value!r:.100} is none of {words}",
                )
        elif ours in how.columns:
            names = " or ".join((theirs,) if isinstance(theirs, str) else theirs)
            present = ", ".join(name for name in list(row)[:20] if not name.startswith("@"))
            raise DataFailure(
                f"{row['@file']}, row {row['@index']}",
                f"no {names} for {ours!r}; the row has {present}",
            )
    made.setdefault("id", f"{row['@split']}-{row['@index']}")
    return made


def first(row: Mapping[str, Any], where: Where) -> Any:
    """The first of the named columns that the row has, not null and not blank; else None."""
    values = (_value(row, one) for one in ((where,) if isinstance(where, str) else where))
    return next(
        (value for value in values if value is not None and value != [] and str(value).strip()),
        None,
    )


def _value(row: Mapping[str, Any], where: str) -> Any:
    if "{" not in where:
        return found(row, where)
    values = {name: found(row, name) for name in _PLACE.findall(where)}
    if any(value is None for value in values.values()):
        return None
    return _PLACE.sub(lambda match: str(values[match[1]]), where)


def found(row: Any, path: str) -> Any:
    """What is at ``a`` or ``a.b``; None where there is nothing.

    A column whose name has a dot is found under it.
    """
    if isinstance(row, Mapping) and path in row:
        return row[path]
    name, _, rest = path.partition(".")
    if isinstance(row, Mapping):
        value = row.get(name)
    elif (
        isinstance(row, list | tuple)
        and re.fullmatch(r"-?\d+", name)
        and -len(row) <= int(name) < len(row)
    ):
        value = row[int(name)]
    else:
        return None
    return found(parsed(value), rest) if rest else value


_LONGEST_FIELD = 2**31 - 1
"""Characters: HR-Bench's tables hold whole images as base64."""


def folder(how: ColumnMap, local: Path | None, hub: str) -> Path:
    """The data set's folder: ``local``, or what the Hub has under ``hub``, which then lies in its
    cache. Raises ConfigError.
    """
    if local is not None:
        if not local.is_dir():
            raise ConfigError(f"--from {local} is no folder (seen from {Path.cwd()})")
        return local
    name = hub or how.hub
    if not name:
        raise ConfigError(
            "this data set has no known name on the Hub: download it, and name its folder with"
            " --from FOLDER"
        )
    patterns = [*(pattern for many in how.files.values() for pattern in many), *how.archives]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except (
        Exception
    ) as error:  # no network, no such data set, no permission: its classes are many, and change
        wanted = " ".join(f'--include "{pattern}"' for pattern in patterns)
        raise ConfigError(
            f"the Hub did not give {name}: {type(error).__name__}: {str(error)[:300]}. On a machine"
            f" that reaches it, run\n    hf download {name} --repo-type dataset --local-dir FOLDER"
            f" {wanted}\nthen name that folder with --from FOLDER"
        ) from error


def files(how: ColumnMap, root: Path, split: str) -> list[Path]:
    """The files of a published split, sorted. Raises ConfigError when no pattern finds one."""
    for pattern in how.files[split]:
        if present := sorted(path for path in root.glob(pattern) if path.is_file()):
            return present
    raise ConfigError(
        f"{root} has no files of the split {split}: none matches {' or '.join(how.files[split])}"
    )


def present(how: ColumnMap, root: Path) -> tuple[str, ...]:
    """The published splits that have files. Raises ConfigError when none has."""
    found = [
        split
        for split, patterns in how.files.items()
        if any(next(root.glob(one), None) for one in patterns)
    ]
    if not found:
        wanted = "\n    ".join(
            f"{split}: {' or '.join(patterns)}" for split, patterns in how.files.items()
        )
        raise ConfigError(f"{root} has none of the data set's files:\n    {wanted}")
    return tuple(found)


def entries(how: ColumnMap, root: Path, split: str) -> Iterator[Mapping[str, Any] | DataFailure]:
    """The rows of a published split with ``@split``, ``@file``, ``@suffix``, ``@index``,
    ``@folder``; bad lines as DataFailure.
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
            for one in expanded(row, how.each):
                yield {
                    **one,
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
        csv.field_size_limit(min(_LONGEST_FIELD, sys.maxsize))
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
        raise ConfigError(f"{path} is no JSON: {error}") from error
    value = found(value, rows_at) if rows_at and isinstance(value, Mapping) else value
    if (
        isinstance(value, Mapping)
        and value
        and not any(isinstance(one, Mapping) for one in value.values())
    ):
        value = [value]  # a file of a row
    if isinstance(value, Mapping):
        value = [
            {"key": key, **one} if isinstance(one, Mapping) else one for key, one in value.items()
        ]
    if not isinstance(value, list):
        raise ConfigError(f"{path} holds no list of rows{f' under {rows_at!r}' if rows_at else ''}")
    return value


def fractions(box: Any, kind: Boxes, width: int, height: int, where: str) -> list[float]:
    """Corners [x1, y1, x2, y2] as fractions of the image; ``kind`` as in ``ColumnMap.boxes``.

    Raises DataFailure for others.
    """
    try:
        a, b, c, d = map(float, () if isinstance(box, str) else box)
    except (TypeError, ValueError) as error:
        raise DataFailure(where, f"a box has four numbers, not {box!r:.100}") from error
    if kind == "pixels_and_size":
        c, d = a + c, b + d
    if kind != "fractions":
        a, b, c, d = a / width, b / height, c / width, d / height
    if 0 <= a < c <= 1 and 0 <= b < d <= 1:
        return [a, b, c, d]
    why = f"lies outside the image of {width} x {height} pixels"
    if a == c or b == d:
        why = "has no width or no height"
    elif kind == "fractions" and max(a, b, c, d) > 1:
        why = "has values above one, so it is in pixels: say so in the map (boxes)"
    elif a > c or b > d:
        why = "has its corners reversed"
    raise DataFailure(where, f"the box {box} ({kind}) {why}")
