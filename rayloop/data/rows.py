"""The rows of a data file, JSONL, a JSON array or parquet, with the place of each; another shape is
refused with advice.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.files import utf8

_HEAD = 2**20
"""Bytes that show the shape of a file."""
AT_ONCE = 256
"""Rows of a parquet file that are decoded together, at most."""
DECODED_AT_ONCE = 2**28
"""Bytes that they may become then."""
EXPANSION, LEAST_DECODED = 1000, 2**29
"""A parquet file may become so many times its size, and this many bytes in any case: columns that
repeat a long prompt do.
"""
_TAR = slice(257, 262)
"""Where a tar archive says so."""
_NEEDED = "one JSON object per line is needed"
_ARRAY = "is a JSON array"


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, row) of each row, or a DataFailure for a bad line; in arrays and parquet
    file:number. Raises ConfigError.
    """
    if path.is_dir() or {*"*?"} & {*path.name}:
        shards = path if path.is_dir() else path.parent
        joined = (
            f"import pyarrow.parquet as p; p.write_table(p.read_table('{shards}'), 'rows.parquet')"
        )
        raise ConfigError(
            f'{path}: rows are read from one file. Join the shards: python -c "{joined}"'
        )
    if not path.is_file():
        raise ConfigError(f"{path} is no file; data files are JSONL, a JSON array or parquet")
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    shape = _other_shape(path)
    if shape.startswith(_ARRAY) and path.suffix == ".json":
        yield from _array(path)
        return
    if shape:
        raise ConfigError(f"{path} {shape}")
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                # Editors on Windows begin a file with a byte order mark.
                yield where, _parsed(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield where, DataFailure(where, f"not a line of UTF-8 JSON: {error}")


def _parsed(text: str) -> Any:
    """The value of a JSON text, whose texts have a form in UTF-8: a row goes to graders, judges and
    agents. Raises ValueError.
    """
    value = json.loads(text)
    if "\\ud" in text.lower():  # only an escape can stand for half a surrogate pair
        return json.loads(utf8(json.dumps(value, ensure_ascii=False)))
    return value


def parsed(value: Any) -> Any:
    """A column that may be an object or a list as JSON text, as parquet files have tables and
    boxes; any other value stays.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _other_shape(path: Path) -> str:
    """What the file is instead of JSONL and what to do, by its beginning; empty when it may be
    JSONL.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    if head.startswith(b"\x1f\x8b"):
        return "is compressed; unpack it first (gunzip)"
    if head[_TAR] == b"ustar":
        return f"is a tar archive; {_NEEDED}, with paths of images that lie beside it: tar -xf FILE"
    if head.startswith(b"PAR1"):
        return "is a parquet file; name it .parquet"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16 text; UTF-8 is needed: iconv -f UTF-16 -t UTF-8 FILE > rows.jsonl"
    lines = [
        line.strip() for line in head.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()
    ]
    if not lines:
        return f"is empty; {_NEEDED}"
    first, second = lines[0], lines[1] if len(lines) > 1 else None
    if path.suffix in (".csv", ".tsv") and not first.startswith(b"{"):
        return (
            f"is a table; {_NEEDED}: pandas.read_csv(FILE).to_json('rows.jsonl', orient='records',"
            " lines=True)"
        )
    if first.startswith(b"[") and (second is None or not _is_json(first)):
        return f"{_ARRAY}; name it .json"
    if (
        first.startswith(b"{")
        and second is not None
        and not second.startswith(b"{")
        and not _is_json(first)
    ):
        return f"holds JSON objects over several lines; {_NEEDED}: jq -c . FILE > rows.jsonl"
    return ""


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        found = _parsed(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} begins like a JSON array and is none: {error}. Correct it, or write a row per"
            " line"
        ) from error
    for number, row in enumerate(found, start=1):
        yield f"{path}:{number}", row


def _batches(path: Path) -> Iterator[Any]:
    """The rows of a parquet file in parts that have a bounded size: each row may be as large as all
    of a column, since a dictionary holds equal values once.
    """
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    largest = max((column.total_uncompressed_size for column in columns), default=0)
    return iter(
        file.iter_batches(batch_size=max(1, min(AT_ONCE, DECODED_AT_ONCE // max(1, largest))))
    )


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow

    number, decoded = 0, 0
    # Dictionary pages let a file of kilobytes become gigabytes of equal values.
    most = max(LEAST_DECODED, EXPANSION * path.stat().st_size)
    try:
        for batch in _batches(path):
            decoded += batch.nbytes
            if decoded > most:
                why = (
                    f"its first {number + len(batch)} rows have {decoded:,} bytes, more than"
                    f" {EXPANSION} times the file's"
                )
                raise ConfigError(
                    f"{path}: {why}: it was made to fill a memory. Write it again as JSONL if it is"
                    " yours"
                )
            # Maps become dicts: of a key that comes twice the last value stays, as in JSON.
            found = batch.to_pylist(maps_as_pydicts="lossy")
            # Its memory would stay until the next batch replaces it.
            del batch
            for row in found:
                number += 1
                yield f"{path}:{number}", row
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"{path} cannot be read as parquet behind row {number}: {error}"
        ) from error
    finally:
        # it would keep twice the size of the images that are rows now
        pyarrow.default_memory_pool().release_unused()
