"""The rows of a data file (JSONL, a JSON array or parquet), with the place of each.

A file of another shape is refused with advice.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.files import utf8

_HEAD_BYTES = 2**20
"""Bytes that show the shape of a file."""
BATCH_ROWS = 256
"""The most rows of a parquet file that are decoded together."""
DECODED_AT_ONCE_BYTES = 2**28
"""The most bytes that rows decoded together may have."""
MAX_EXPANSION_FACTOR = 1000
"""A decoded parquet file may have this many times the size of the file."""
MIN_DECODED_LIMIT_BYTES = 2**29
"""Bytes that every decoded parquet file may have: columns that repeat a long prompt grow most."""
_TAR_MAGIC = slice(257, 262)
"""The bytes by which a tar archive is recognised."""
_NEEDED = "one JSON object per line is needed"
_ARRAY = "is a JSON array"


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, row) of each row, with a DataFailure as the row for a bad line.

    Arrays and parquet files have file:number. Raises ConfigError.
    """
    if path.is_dir() or {*"*?"} & {*path.name}:
        shards = path if path.is_dir() else path.parent
        program = (
            f"import pyarrow.parquet as p; p.write_table(p.read_table('{shards}'), 'rows.parquet')"
        )
        raise ConfigError(
            f'{path}: rows are read from one file. Join the shards: python -c "{program}"'
        )
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; data files are JSONL, a JSON array or parquet")
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
    """The value of a JSON text, with texts that UTF-8 can encode. Raises ValueError.

    Graders, judges and agents get the row as UTF-8.
    """
    value = json.loads(text)
    if "\\ud" in text.lower():  # only an escape can stand for half a surrogate pair
        return json.loads(utf8(json.dumps(value, ensure_ascii=False)))
    return value


def parsed(value: Any) -> Any:
    """A column's value, decoded where it is an object or a list as JSON text.

    Parquet files have tables and boxes in this form. Any other value stays.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _other_shape(path: Path) -> str:
    """The actual format of a file that is not JSONL, by its beginning, with advice.

    Empty when the file may be JSONL.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"\x1f\x8b"):
        return "is compressed; unpack it first (gunzip)"
    if head[_TAR_MAGIC] == b"ustar":
        return f"is a tar archive; {_NEEDED}, with paths of images in the same folder: tar -xf FILE"
    if head.startswith(b"PAR1"):
        return "is a parquet file; name it .parquet"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16 text; UTF-8 is needed: iconv -f UTF-16 -t UTF-8 FILE > rows.jsonl"
    lines = [
        line.strip() for line in head.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()
    ]
    if not lines:
        return f"is empty; {_NEEDED}"
    first = lines[0]
    second = lines[1] if len(lines) > 1 else None
    if path.suffix in (".csv", ".tsv") and not first.startswith(b"{"):
        return (
            f"is a table; {_NEEDED}: pandas.read_csv(FILE).to_json('rows.jsonl', orient='records',"
            " lines=True)"
        )
    if first.startswith(b"[") and (second is None or not _is_json(first)):
        return f"{_ARRAY}; name it .json"
    object_continues = second is not None and not second.startswith(b"{")
    if first.startswith(b"{") and object_continues and not _is_json(first):
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
        array = _parsed(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} begins like a JSON array but is not valid: {error}. Correct it, or write one"
            " row per line"
        ) from error
    for number, row in enumerate(array, start=1):
        yield f"{path}:{number}", row


def _batches(path: Path) -> Iterator[Any]:
    """The rows of a parquet file in batches of bounded size.

    Each row may be as large as a whole column, since a dictionary holds equal values once.
    """
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    largest = 1
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        for index in range(group.num_columns):
            largest = max(largest, group.column(index).total_uncompressed_size)
    rows_that_fit = max(1, DECODED_AT_ONCE_BYTES // largest)
    return iter(file.iter_batches(batch_size=min(BATCH_ROWS, rows_that_fit)))


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow

    number = 0
    decoded_bytes = 0
    # Dictionary pages let a file of kilobytes become gigabytes of equal values.
    most_bytes = max(MIN_DECODED_LIMIT_BYTES, MAX_EXPANSION_FACTOR * path.stat().st_size)
    try:
        for batch in _batches(path):
            decoded_bytes += batch.nbytes
            if decoded_bytes > most_bytes:
                raise ConfigError(
                    f"{path}: its first {number + len(batch)} rows have {decoded_bytes:,} bytes,"
                    f" more than {MAX_EXPANSION_FACTOR} times the file's: it was made to fill a"
                    " memory. Write it again as JSONL if it is yours"
                )
            # Maps become dicts: of a key that comes twice the last value stays, which is JSON's
            # rule.
            decoded_rows = batch.to_pylist(maps_as_pydicts="lossy")
            # Its memory would stay until the next batch replaces it.
            del batch
            for row in decoded_rows:
                number += 1
                yield f"{path}:{number}", row
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"{path} cannot be read as parquet behind row {number}: {error}"
        ) from error
    finally:
        # Otherwise the pool keeps twice the size of the images that are rows now.
        pyarrow.default_memory_pool().release_unused()
