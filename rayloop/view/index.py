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
from rayloop.run.folder import RunFolder, is_rollout
from rayloop.run.records.jsonl import JsonLines
from rayloop.view.reader import Record

VERSION = 1
"""Of the tables; an index of another version is made anew."""
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
GROUPS = """step, grp, sample, task, source, COUNT(*) AS members, AVG(reward) AS mean, MIN(reward) AS low, MAX(reward) AS high,
GROUP_CONCAT(DISTINCT status) AS status, GROUP_CONCAT(DISTINCT end_reason) AS end_reason"""
SAVED = 0.5
"""Seconds between two commits while many files are read."""


class EpisodeIndex:
    """In the run's folder, ``index.sqlite``; in the user's cache where that cannot be written.

    Thread-safe.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._dump, self.path, self._busy = folder.rollouts, _place(folder.path), threading.Lock()
        with suppress(sqlite3.DatabaseError), self._opened() as db:
            if (
                db.execute("PRAGMA user_version").fetchone()[0] == VERSION
                and _tables(db) == _expected()
            ):
                return
        self.path.unlink(missing_ok=True)
        with self._opened() as db:
            db.executescript(TABLES.read_text(encoding="utf-8"))
            db.execute(f"PRAGMA user_version = {VERSION}")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=10)) as db:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA synchronous = OFF")  # it can be made again
            yield db

    def update(self, seconds: float = threading.TIMEOUT_MAX) -> None:
        """Read the files that are new or have changed, for so long; those of steps that are gone
        are forgotten. Another thread that does so already is waited for, as long.
        """
        if not self._busy.acquire(timeout=seconds):
            return
        try:
            with (
                self._opened() as db,
                suppress(FileNotFoundError),
            ):  # one was set aside in this moment
                self._read(db, time.monotonic() + seconds)
        finally:
            self._busy.release()

    def _read(self, db: sqlite3.Connection, until: float) -> None:
        """The newest files first."""
        known = {
            row["step"]: (row["changed"], row["size"]) for row in db.execute("SELECT * FROM files")
        }
        found = {step: (file, file.stat()) for step, file in self._dump.files().items()}
        files = {
            step: (file, stat.st_mtime_ns, stat.st_size) for step, (file, stat) in found.items()
        }
        for step in known.keys() - files.keys():
            _forget(db, step)
        saved = time.monotonic()
        for step in sorted(
            (step for step, (_, *now) in files.items() if known.get(step) != tuple(now)),
            reverse=True,
        ):
            _add(db, step, *files[step])
            if (now := time.monotonic()) > min(until, saved + SAVED):
                db.commit()
                saved = now
                if now > until:
                    return
        db.commit()

    def state(self) -> dict[str, Any]:
        """``episodes``, ``read`` of all ``files``, ``broken``: step -> what is wrong with its file,
        ``choices`` of each filter.
        """
        with self._opened() as db:
            return {
                "episodes": db.execute("SELECT COUNT(*) FROM episodes").fetchone()[0],
                "read": db.execute("SELECT COUNT(*) FROM files").fetchone()[0],
                "files": len(self._dump.files()),
                "broken": dict(
                    map(tuple, db.execute("SELECT step, why FROM files WHERE why <> ''"))
                ),
                "choices": {
                    n: [r[0] for r in db.execute(f"SELECT DISTINCT {n} FROM episodes ORDER BY 1")]
                    for n in CHOICES
                },
            }

    def search(
        self, filters: Mapping[str, str], order: str, groups: bool, start: int, count: int
    ) -> tuple[int, list[Record]]:
        """How many episodes (``groups``: with one) fit all ``filters`` (of ``WHERE``), and
        ``count`` of them from ``start`` on.
        """
        plain = {
            name: value.replace("\0", " ").strip() for name, value in filters.items()
        }  # SQLite ends a text at a zero
        given = {name: value for name, value in plain.items() if name in WHERE and value}
        wanted = given | ({"text": _phrases(given["text"])} if "text" in given else {})
        where = " AND ".join(["TRUE", *(WHERE[name] for name in wanted)])
        chosen, by = (
            (GROUPS, " GROUP BY step, grp")
            if groups
            else (f"{', '.join(COLUMNS)}, reward AS mean", "")
        )
        query, values = f"SELECT {chosen} FROM episodes WHERE {where}{by}", list(wanted.values())
        with self._opened() as db:
            total = db.execute(
                f"SELECT COUNT(*) FROM (SELECT 1 FROM episodes WHERE {where}{by})", values
            ).fetchone()[0]
            rows = db.execute(
                f"{query} ORDER BY {ORDERS.get(order, ORDERS['newest'])} LIMIT ? OFFSET ?",
                [*values, count, start],
            )
            return total, [dict(row) for row in rows]


def _place(run: Path) -> Path:
    if (
        os.access(run, os.W_OK) and not (run / "index.sqlite").is_symlink()
    ):  # a link would lead to any file
        return run / "index.sqlite"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rayloop"
    cache.mkdir(parents=True, exist_ok=True)
    return (
        cache / f"{run.name}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]}.sqlite"
    )


def _tables(db: sqlite3.Connection) -> list[Any]:
    return [tuple(row) for row in db.execute("SELECT name, sql FROM sqlite_master ORDER BY name")]


@cache
def _expected() -> list[Any]:
    """Of an index that this version has made; another one's would have other columns, or triggers."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(TABLES.read_text(encoding="utf-8"))
        return _tables(db)


def _forget(db: sqlite3.Connection, step: int) -> None:
    """Its words stay, of ids that no episode has any more."""
    db.execute("DELETE FROM episodes WHERE step = ?", (step,))
    db.execute("DELETE FROM files WHERE step = ?", (step,))


def _add(db: sqlite3.Connection, step: int, file: Path, changed: int, size: int) -> None:
    _forget(db, step)
    insert, why = f"INSERT INTO episodes ({', '.join(COLUMNS)}) VALUES (:{', :'.join(COLUMNS)})", ""
    records = JsonLines(file, is_rollout)
    try:
        for record in records:
            made = {"step": step, "grp": record["group"], "flags": " ".join(record["flags"])}
            made |= {
                "turns": sum(turn["sampled"] for turn in record["turns"]),
                **{name: record.get(name) for name in COPIED},
            }
            plain = {
                name: utf8(value) if isinstance(value, str) else value
                for name, value in made.items()
            }
            row = db.execute(insert, plain).lastrowid
            db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row, _text(record)))
    except (ValueError, KeyError, TypeError, sqlite3.ProgrammingError) as error:
        why = f"it cannot be read: {type(error).__name__}: {error}"
    if records.damaged and not why:
        why = f"damaged lines are left out: {records.damaged}"
    db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (step, changed, size, why))


def _text(record: Record) -> str:
    """What can be searched: the task, its prompt and truth, all turns, flags, and what a judge
    said.
    """
    named = (
        str(record.get(name) or "") for name in ("task", "prompt", "truth", "unscored", "reason")
    )
    return utf8("\n".join([*named, *record["flags"], *(turn["text"] for turn in record["turns"])]))


def _phrases(text: str) -> str:
    """Words as FTS5's phrases, so that none is an operator."""
    return " ".join('"' + word.replace('"', '""') + '"*' for word in utf8(text).split())
