"""Verdicts that are known, in memory and in an SQLite file that runs and processes share.

Failures are never kept.
"""

import hashlib
import json
import logging
import re
import sqlite3
from pathlib import Path

from rayloop.core.threads import Cache
from rayloop.judge.api import JudgeItem, JudgeVerdict

logger = logging.getLogger(__name__)


def cache_key(item: JudgeItem, fingerprint: str) -> str:
    """The digest of all that a verdict depends on: judge, rubric, source, question, reference,
    images and answer.
    """
    # Answers that differ in more than spaces and tabs have different keys: 5² is another answer
    # than 52.
    answer = re.sub(r"[ \t]+", " ", item.answer).strip()
    images = [_version(Path(path)) for path in item.images]
    parts = [fingerprint, item.rubric, item.source, item.question, item.reference, answer, images]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _version(image: Path) -> tuple[str, int, int]:
    """Path, size in bytes and time of the last change in ns, since the file at a path may change;
    zeros when it is missing.
    """
    try:
        found = image.stat()
    except (OSError, ValueError):
        return str(image), 0, 0
    return str(image), found.st_size, found.st_mtime_ns


class VerdictCache:
    """At most ``size`` verdicts in memory, the least recently used go first; and all of them in the
    SQLite file ``path``, if any. A file that fails (full, locked, corrupt, on a file system without
    locks) is reported once and not used again.
    """

    def __init__(self, size: int, path: Path | None = None) -> None:
        self._memory: Cache[str, JudgeVerdict] = Cache(size)
        self._file: sqlite3.Connection | None = None
        if path is not None:
            try:
                self._file = _open(path)
            except (sqlite3.Error, OSError) as error:
                self._give_up(error)

    def get(self, key: str) -> JudgeVerdict | None:
        """The verdict, marked ``cached``; None when it is not known."""
        verdict = self._memory.get(key)
        if verdict is None and self._file is not None:
            try:
                row = self._file.execute(
                    "SELECT verdict FROM verdicts WHERE key = ?", (key,)
                ).fetchone()
                verdict = JudgeVerdict.model_validate_json(row[0]) if row else None
            except (sqlite3.Error, ValueError) as error:
                self._give_up(error)
        if verdict is None:
            return None
        self._memory.put(key, verdict)
        return verdict.model_copy(update={"cached": True})

    def put(self, key: str, verdict: JudgeVerdict) -> None:
        """Keep a verdict."""
        self._memory.put(key, verdict)
        if self._file is not None:
            try:
                with self._file:
                    self._file.execute(
                        "INSERT OR REPLACE INTO verdicts VALUES (?, ?)",
                        (key, verdict.model_dump_json()),
                    )
            except sqlite3.Error as error:
                self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: Exception) -> None:
        logger.warning("the verdict cache's file is not used any more: %s", error)
        self.close()


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader blocks the event loop, so it waits only a second for a lock of another process.
    connection = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    # A power cut may cost the last verdicts, which are then asked for again, but never the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, verdict TEXT NOT NULL) WITHOUT"
        " ROWID"
    )
    return connection
