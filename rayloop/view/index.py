"""An index of the recorded episodes in SQLite, for filters and a search by words.

A file of rollouts is read once.
"""

import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from rayloop.core.files import utf8
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import JsonLines
from rayloop.run.records.rollouts import is_rollout
from rayloop.view.reader import Record

TABLES_VERSION = 1
"""Version of the tables; an index of another version is built again."""
COPIED = (
    "sample",
    "task",
    "source",
    "reward",
    "end_reason",
    "status",
    "length",
    "replayed",
    "advantage",
)
COLUMNS = ("step", "grp", "turns", "flags", *COPIED)
TABLES = Path(__file__).with_name("index.sql")
CHOICES = ("source", "end_reason", "status")
WHERE = {
    "step": "step = CAST(? AS INTEGER)",
    **{name: f"{name} = ?" for name in CHOICES},
    "least": "reward >= CAST(? AS REAL)",
    "most": "reward <= CAST(? AS REAL)",
    "text": "id IN (SELECT rowid FROM words WHERE words MATCH ?)",
}
"""Filter -> its condition. ``text``: each word, or beginning of a word, occurs."""
ORDERS = {
    name: f"{first}step DESC, grp, sample"
    for name, first in (
        ("newest", ""),
        ("highest", "mean DESC, "),
        ("lowest", "mean IS NULL, mean, "),
    )
}
GROUPS = """step, grp, sample, task, source, COUNT(*) AS members,
AVG(reward) AS mean, MIN(reward) AS low, MAX(reward) AS high,
GROUP_CONCAT(DISTINCT status) AS status, GROUP_CONCAT(DISTINCT end_reason) AS end_reason"""
COMMIT_EVERY_S = 0.5
"""Seconds between two commits while many files are read."""


class EpisodeIndex:
    """The index ``index.sqlite`` in the run's folder.

    It is in the user's cache where the run's folder cannot be written. Thread-safe.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._dump = folder.rollouts
        self.path = _place(folder.path)
        self._busy = threading.Lock()
        with suppress(sqlite3.DatabaseError), self._opened() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == TABLES_VERSION and _tables(db) == _expected_tables():
                return
        self.path.unlink(missing_ok=True)
        with self._opened() as db:
            db.executescript(TABLES.read_text(encoding="utf-8"))
            db.execute(f"PRAGMA user_version = {TABLES_VERSION}")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=10)) as db:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA synchronous = OFF")  # a lost index can be built again
            yield db

    def update(self, seconds: float = threading.TIMEOUT_MAX) -> None:
        """Read the files that are new or have changed, for ``seconds`` at most.

        Files of removed steps leave the index. Where another thread updates already, this one waits
        for it, for ``seconds`` at most.
        """
        if not self._busy.acquire(timeout=seconds):
            return
        try:
            # A file may be renamed between its listing and its reading.
            with self._opened() as db, suppress(FileNotFoundError):
                self._read(db, time.monotonic() + seconds)
        finally:
            self._busy.release()

    def _read(self, db: sqlite3.Connection, until: float) -> None:
        """Read the files that the index lacks, the newest first."""
        indexed = {
            row["step"]: (row["changed"], row["size"]) for row in db.execute("SELECT * FROM files")
        }
        files = self._dump.files()
        states = {step: _file_state(file) for step, file in files.items()}
        for step in indexed.keys() - files.keys():
            _forget(db, step)
        outdated = [step for step, state in states.items() if indexed.get(step) != state]
        committed = time.monotonic()
        for step in sorted(outdated, reverse=True):
            _add(db, step, files[step], *states[step])
            now = time.monotonic()
            if now > min(until, committed + COMMIT_EVERY_S):
                db.commit()
                committed = now
                if now > until:
                    return
        db.commit()

    def state(self) -> dict[str, Any]:
        """The size and the faults of the index.

        ``episodes``, ``read`` of all ``files``, ``broken``: step -> the fault of its file,
        ``choices`` of each filter.
        """
        with self._opened() as db:
            broken = db.execute("SELECT step, why FROM files WHERE why <> ''")
            return {
                "episodes": db.execute("SELECT COUNT(*) FROM episodes").fetchone()[0],
                "read": db.execute("SELECT COUNT(*) FROM files").fetchone()[0],
                "files": len(self._dump.files()),
                "broken": dict(map(tuple, broken)),
                "choices": {column: _distinct(db, column) for column in CHOICES},
            }

    def search(
        self, filters: Mapping[str, str], order: str, groups: bool, start: int, count: int
    ) -> tuple[int, list[Record]]:
        """The number of episodes that fit all ``filters`` (of ``WHERE``), and a page of them.

        The page has ``count`` episodes, the first with the index ``start``. With ``groups`` both
        are groups that have such an episode.
        """
        conditions: list[str] = []
        values: list[Any] = []
        for name, raw_value in filters.items():
            value = raw_value.replace("\0", " ").strip()  # SQLite ends a text at a zero
            if name in WHERE and value:
                conditions.append(WHERE[name])
                values.append(_phrases(value) if name == "text" else value)
        columns = GROUPS if groups else f"{', '.join(COLUMNS)}, reward AS mean"
        source = f"FROM episodes WHERE {' AND '.join(['TRUE', *conditions])}"
        if groups:
            source += " GROUP BY step, grp"
        ordering = ORDERS.get(order, ORDERS["newest"])
        with self._opened() as db:
            counting = db.execute(f"SELECT COUNT(*) FROM (SELECT 1 {source})", values)
            total = counting.fetchone()[0]
            rows = db.execute(
                f"SELECT {columns} {source} ORDER BY {ordering} LIMIT ? OFFSET ?",
                [*values, count, start],
            )
            return total, [dict(row) for row in rows]


def _place(run: Path) -> Path:
    index = run / "index.sqlite"
    if os.access(run, os.W_OK) and not index.is_symlink():  # a link would lead to any file
        return index
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rayloop"
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()
    return cache / f"{run.name}-{digest[:16]}.sqlite"


def _tables(db: sqlite3.Connection) -> list[Any]:
    return [tuple(row) for row in db.execute("SELECT name, sql FROM sqlite_master ORDER BY name")]


@cache
def _expected_tables() -> list[Any]:
    """The tables of this version's index; a foreign index would have other columns, or triggers."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(TABLES.read_text(encoding="utf-8"))
        return _tables(db)


def _distinct(db: sqlite3.Connection, column: str) -> list[Any]:
    """The values of a column of the episodes, sorted."""
    return [row[0] for row in db.execute(f"SELECT DISTINCT {column} FROM episodes ORDER BY 1")]


def _file_state(file: Path) -> tuple[int, int]:
    """The time of a file's last change in ns, and its size: they show whether it has changed."""
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size


def _forget(db: sqlite3.Connection, step: int) -> None:
    """Remove the episodes of a step; their words stay, with ids that no episode has any more."""
    db.execute("DELETE FROM episodes WHERE step = ?", (step,))
    db.execute("DELETE FROM files WHERE step = ?", (step,))


def _add(db: sqlite3.Connection, step: int, file: Path, changed: int, size: int) -> None:
    """Replace the episodes of a step by the ones in its file, and record the file's fault."""
    _forget(db, step)
    insert = f"INSERT INTO episodes ({', '.join(COLUMNS)}) VALUES (:{', :'.join(COLUMNS)})"
    fault = ""
    records = JsonLines(file, is_rollout)
    try:
        for record in records:
            row = db.execute(insert, _episode(step, record)).lastrowid
            db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row, _text(record)))
    except (ValueError, KeyError, TypeError, sqlite3.ProgrammingError) as error:
        fault = f"it cannot be read: {type(error).__name__}: {error}"
    if records.damaged and not fault:
        fault = f"damaged lines are left out: {records.damaged}"
    db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (step, changed, size, fault))


def _episode(step: int, record: Record) -> Record:
    """The row of an episode, in texts that UTF-8 can encode."""
    row = {
        "step": step,
        "grp": record["group"],
        "flags": " ".join(record["flags"]),
        "turns": sum(turn["sampled"] for turn in record["turns"]),
        **{name: record.get(name) for name in COPIED},
    }
    return {name: utf8(value) if isinstance(value, str) else value for name, value in row.items()}


def _text(record: Record) -> str:
    """The searchable text: task, prompt, truth, flags, all turns, and the judge's explanation."""
    names = ("task", "prompt", "truth", "unscored", "reason")
    texts = [str(record.get(name) or "") for name in names]
    texts += record["flags"]
    texts += (turn["text"] for turn in record["turns"])
    return utf8("\n".join(texts))


def _phrases(text: str) -> str:
    """Words as FTS5's phrases, so that none is an operator."""
    return " ".join('"' + word.replace('"', '""') + '"*' for word in utf8(text).split())
