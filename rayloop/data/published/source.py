"""Where a published data set is found: a local folder, or the Hugging Face Hub; and the rows of its files."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayloop.core.failures import ConfigError, DataFailure
from rayloop.data.published.column_map import ColumnMap, expanded, found
from rayloop.data.rows import rows

_LONGEST_FIELD = 2**31 - 1
"""Characters: HR-Bench's tables hold whole images as base64."""


def folder(how: ColumnMap, local: Path | None, hub: str) -> Path:
    """The data set's folder: ``local``, or what the Hub has under ``hub``, which then lies in its cache. Raises ConfigError."""
    if local is not None:
        if not local.is_dir():
            raise ConfigError(f"--from {local} is no folder (seen from {Path.cwd()})")
        return local
    name = hub or how.hub
    if not name:
        raise ConfigError("this data set has no known name on the Hub: download it, and name its folder with --from FOLDER")
    patterns = [*(pattern for many in how.files.values() for pattern in many), *how.archives]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # no network, no such data set, no permission: its classes are many, and change
        wanted = " ".join(f'--include "{pattern}"' for pattern in patterns)
        raise ConfigError(
            f"the Hub did not give {name}: {type(error).__name__}: {str(error)[:300]}. On a machine that reaches it, run\n"
            f"    hf download {name} --repo-type dataset --local-dir FOLDER {wanted}\n"
            "then name that folder with --from FOLDER"
        ) from error


def files(how: ColumnMap, root: Path, split: str) -> list[Path]:
    """The files of a published split, sorted. Raises ConfigError when no pattern finds one."""
    for pattern in how.files[split]:
        if present := sorted(path for path in root.glob(pattern) if path.is_file()):
            return present
    raise ConfigError(f"{root} has no files of the split {split}: none matches {' or '.join(how.files[split])}")


def present(how: ColumnMap, root: Path) -> tuple[str, ...]:
    """The published splits that have files. Raises ConfigError when none has."""
    found = [split for split, patterns in how.files.items() if any(next(root.glob(one), None) for one in patterns)]
    if not found:
        wanted = "\n    ".join(f"{split}: {' or '.join(patterns)}" for split, patterns in how.files.items())
        raise ConfigError(f"{root} has none of the data set's files:\n    {wanted}")
    return tuple(found)


def entries(how: ColumnMap, root: Path, split: str) -> Iterator[Mapping[str, Any] | DataFailure]:
    """The rows of a published split, with ``@split``, ``@file``, ``@index`` and ``@folder`` (their file's) as columns.

    A line that cannot be read comes as the DataFailure that says why. Raises ConfigError.
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
                yield {**one, "@split": split, "@file": path.stem, "@index": index, "@folder": str(path.parent)}
                index += 1


def _rows(path: Path, rows_at: str) -> Iterator[Any]:
    if path.suffix in (".tsv", ".csv"):
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
    if isinstance(value, Mapping):
        value = [{"key": key, **one} if isinstance(one, Mapping) else one for key, one in value.items()]
    if not isinstance(value, list):
        raise ConfigError(f"{path} holds no list of rows{f' under {rows_at!r}' if rows_at else ''}")
    return value
