"""A cache of verdicts, in memory and in an SQLite file that runs and processes share.

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

_LOCK_TIMEOUT_S = 1.0


def cache_key(item: JudgeItem, fingerprint: str) -> str:
    """The digest of everything that a verdict depends on.

    Judge, rubric, source, question, reference, images and answer.
    """
    # Only spaces and tabs are ignored, since 5² is another answer than 52.
    answer = re.sub(r"[ \t]+", " ", item.answer).strip()
    images = [_image_version(Path(path)) for path in item.images]
    parts = [fingerprint, item.rubric, item.source, item.question, item.reference, answer, images]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _image_version(image: Path) -> tuple[str, int, int]:
    """Path, size in bytes and time of the last change in ns, since the file at a path may change.

    Size and time are zero when the file is missing.
    """
    try:
        status = image.stat()
    except (OSError, ValueError):
        return str(image), 0, 0
    return str(image), status.st_size, status.st_mtime_ns


class VerdictCache:
    """At most ``size`` verdicts in memory, and all of them in the SQLite file ``path``, if any.

    The least recently used leave the memory first. A file that fails (full, locked, corrupt, on a
    file system without locks) is reported once and not used again.
    """

    def __init__(self, size: int, path: Path | None = None) -> None:
        self._memory: Cache[str, JudgeVerdict] = Cache(size)
        self._file: sqlite3.Connection | None = None
        if path is not None:
            try:
                self._file = _open(path)
            except (sqlite3.Error, OSError) as error:
                self._abandon_file(error)

    def get(self, key: str) -> JudgeVerdict | None:
        """The verdict, marked ``cached``; None for an unknown key."""
        verdict = self._memory.get(key) or self._stored(key)
        if verdict is None:
            return None
        self._memory.put(key, verdict)
        return verdict.model_copy(update={"cached": True})

    def _stored(self, key: str) -> JudgeVerdict | None:
        if self._file is None:
            return None
        query = "SELECT verdict FROM verdicts WHERE key = ?"
        try:
            row = self._file.execute(query, (key,)).fetchone()
            return JudgeVerdict.model_validate_json(row[0]) if row else None
        except (sqlite3.Error, ValueError) as error:
            self._abandon_file(error)
            return None

    def put(self, key: str, verdict: JudgeVerdict) -> None:
        """Keep a verdict."""
        self._memory.put(key, verdict)
        if self._file is None:
            return
        row = (key, verdict.model_dump_json())
        try:
            with self._file:
                self._file.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", row)
        except sqlite3.Error as error:
            self._abandon_file(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _abandon_file(self, error: Exception) -> None:
        logger.warning("the verdict cache's file is not used any more: %s", error)
        self.close()


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader blocks the event loop, so it waits only a second for a lock of another process.
    connection = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    # A power cut may lose the last verdicts, which are then asked for again, but never the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, verdict TEXT NOT NULL) WITHOUT"
        " ROWID"
    )
    return connection
