"""Append-only JSON lines: one record per line, whole lines only, non-finite numbers as null."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from rayloop.core.files import utf8, write_whole

SCHEMA_VERSION = 1
LARGEST_INTEGER_BITS = 1024
"""A larger whole number is beyond every float; Python refuses to write one of many digits."""
HELD_RECORDS = 10_000
"""Records that are held in memory while the storage refuses them; of more, the newest."""
Fits = Callable[[Mapping[str, Any]], bool]
"""Whether a JSON object is a record of a file.

It is when it has the fields that every reader of that file takes for granted.
"""


class JsonLines:
    """A file of records with ``schema_version`` and ``time`` (Unix seconds).

    One process writes it. The first ``append`` removes an unfinished line. A record that the
    storage refuses is written with the next one that it takes.

    Readers skip damaged lines and count them: a power loss or a network file system leaves zero
    bytes and halves of lines.
    """

    def __init__(self, path: Path, fits: Fits = lambda record: True) -> None:
        """A line that holds no JSON object, or one that does not ``fit``, is damaged."""
        self.path = path
        self.damaged = 0
        """Damaged lines of the last read.

        A read is an iteration, ``split``, or ``since`` from offset 0 on.
        """
        self.trouble: OSError | None = None
        """Why the last record is not on the disk; None when it is."""
        self._held: deque[bytes] = deque(maxlen=HELD_RECORDS)
        self._file: FileIO | None = None
        self._was_open = False
        """Whether it has been open: then it is not created again.

        Its storage may be unmounted, and a new file would be below the mount point.
        """
        self._fits = fits

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, after the held ones.

        Raises TypeError for a value that JSON cannot hold, and never OSError.
        """
        self._held.append(_line(record))
        self._write_held()

    def beside(self, record: Mapping[str, Any]) -> None:
        """Write one line to another process's file.

        Nothing is written if the storage refuses or that process stopped within a line.
        """
        with suppress(OSError), self.path.open("ab+", buffering=0) as file:
            # The other process may have stopped within a
            # line, which this one would complete wrongly.
            file.seek(max(0, file.tell() - 1))
            if file.read(1) in (b"", b"\n"):
                file.write(_line(record))

    def _write_held(self) -> None:
        try:
            if self._file is None:
                _drop_torn_line(self.path)
                create = 0 if self._was_open else os.O_CREAT
                # Without a buffer each line is one write, and
                # its failure is known here, not at the close.
                descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | create, 0o666)
                self._file = FileIO(descriptor, "ab")
                self._was_open = True
            while self._held:
                line = self._held[0]
                size = 0
                # A disk that becomes full takes a part first, and then refuses.
                while size < len(line):
                    size += self._file.write(line[size:])
                self._held.popleft()
            self.trouble = None
        except OSError as error:
            self.trouble = error
            # A line that was cut is removed when the file is opened again.
            self._shut()

    def _shut(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def close(self) -> None:
        """Close the file, after one more try to write the held records.

        A later append opens it again.
        """
        if self._held:
            self._write_held()
        self._shut()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records, in order, without damaged lines and an unfinished last one.

        A missing file has no records; broken UTF-8 is replaced.
        """
        self.damaged = 0
        for line in self._lines():
            record = self._record(line)
            if record is not None:
                yield record

    def since(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The records from byte ``offset`` on, where one begins, and the offset of the next call.

        That is the byte after the last record.
        """
        if not self.path.exists():
            return [], 0
        if offset == 0:
            self.damaged = 0
        lines = list(self._lines(offset))
        records = [record for record in map(self._record, lines) if record is not None]
        return records, offset + sum(map(len, lines))

    def split(self, keep: Callable[[Mapping[str, Any]], bool], aside: Path) -> int:
        """Move the records that ``keep`` refuses to ``aside``, and return their number.

        Damaged lines are moved with them. A crash leaves them in both files. Raises OSError.
        """
        self.close()
        self.damaged = 0
        kept_lines: list[bytes] = []
        moved_lines: list[bytes] = []
        for line in self._lines():
            record = self._record(line)
            if record is not None and keep(record):
                kept_lines.append(line)
            else:
                moved_lines.append(line)
        if moved_lines:
            # The moved ones first: a crash between the two doubles records, and loses none.
            write_whole(aside, b"".join(moved_lines))
            write_whole(self.path, b"".join(kept_lines))
        return len(moved_lines) - self.damaged

    def _lines(self, offset: int = 0) -> Iterator[bytes]:
        """The whole lines from byte ``offset`` on."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def _record(self, line: bytes) -> dict[str, Any] | None:
        """The record of a line; None, and counted, when the line is damaged."""
        text = line.decode(errors="replace")
        try:
            record = json.loads(text, parse_constant=_refused, object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and self._fits(record):
            return record
        self.damaged += 1
        return None


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, unless a key comes twice: then the line is made of the halves of two records."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key comes twice")
    return value


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON, and is never written")


def _line(record: Mapping[str, Any]) -> bytes:
    now = round(time.time(), 3)
    text = encode({"schema_version": SCHEMA_VERSION, "time": now, **record})
    return f"{text}\n".encode()


def encode(record: Mapping[str, Any]) -> str:
    """One line of JSON.

    numpy scalars become numbers, paths text, null for NaN, infinities and integers beyond them;
    texts as by ``utf8``.
    """
    text = json.dumps(
        _finite(record),
        default=_plain,
        allow_nan=False,
        ensure_ascii=False,
        separators=(",", ":"),
    )
    return utf8(text)


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and value.bit_length() > LARGEST_INTEGER_BITS:
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r:.80}")


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
