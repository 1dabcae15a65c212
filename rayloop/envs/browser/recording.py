"""A recording of sites: an index of their answers, and a file for each body.

The first line of ``index.jsonl`` has the schema and the moment of the recording, each further line
an answer. A body's file is named by its SHA-256. A request's body and cookies are kept as hashes
only, and the cookies that a site sets as they are. A folder of a stranger is data: no name in it
is a path, and a body that is not what its name says counts as missing.
"""

import hashlib
import os
import re
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayloop.core.failures import ConfigError
from rayloop.core.files import content, write_whole

INDEX = "index.jsonl"
MAX_INDEX_BYTES = 64 << 20
MAX_BODY_BYTES = 32 << 20
"""Bytes of a body; a larger one is not recorded."""
MAX_RECORDING_BYTES = 2 << 30
"""Bytes of all bodies; what would exceed them is not recorded."""
CLOCK_SPREAD_S = 86_400
"""Seconds around the moment of the recording within which a number in an address is a time."""
OF_TRANSFER = ("content-encoding", "content-length", "transfer-encoding", "connection")
"""Headers about the bytes on the wire; a recorded body is decoded."""
_NUMBER = re.compile(rb"\d+(\.\d+)?")
_DRAWN = re.compile(rb"0\.\d{8,}")
_EXPIRES = re.compile(r";\s*expires=([^;]*)", re.IGNORECASE)
_HASH = "^([0-9a-f]{64})?$"
Key = tuple[str, ...]


@dataclass(frozen=True)
class SiteAnswer:
    """What a site answers; ``headers`` in lower case, several cookies in separate lines."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["rayloop-recording"]
    version: Literal[1]
    moment: int


class Request(BaseModel):
    """A page's request to a site; ``sent`` and ``cookies`` are hashes of its body and cookies.

    The hash of an empty text is empty.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    method: str
    url: str
    sent: str = Field("", pattern=_HASH)
    cookies: str = Field("", pattern=_HASH)

    def keys(self, moment: int) -> list[Key]:
        """What it is found by, from the narrowest to the widest.

        First with the cookies; then without, since another episode's session has others; then with
        times left out of the address, which a page may add to each request. A page's clock repeats
        its seconds and not its milliseconds: by an exact time, a request could find the answer of
        another page that asked at the same millisecond.
        """
        url = self.url.encode()
        to_the_second = _with_times(url, moment, _second).decode()
        timeless = _with_times(url, moment, _nothing).decode()
        return [
            ("cookies", self.method, to_the_second, self.sent, self.cookies),
            ("address", self.method, to_the_second, self.sent),
            ("timeless", self.method, timeless, self.sent),
        ]


class _Entry(Request):
    repeat: int = Field(ge=0)
    """How often the same was asked before in the episode."""
    status: int = Field(ge=100, le=599)
    headers: dict[str, str]
    body: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class Recording:
    """The answers in ``folder``; its methods may be called by several threads."""

    def __init__(self, folder: Path, *, writes: bool = False) -> None:
        """Read the index, or begin one if it ``writes``.

        Raises ConfigError for a folder that holds no recording, or a damaged one.
        """
        self.folder = folder
        self._lock = threading.Lock()
        self._answers: dict[Key, list[_Entry]] = defaultdict(list)
        self._bytes = 0
        if writes:
            self._begin()
        self.moment = self._read()

    def request(self, method: str, url: str, sent: bytes, cookies: str) -> Request:
        """Return a request as it is recorded; times in its body do not count."""
        body = _with_times(sent, self.moment, _nothing)
        return Request(method=method, url=url, sent=_hash(body), cookies=_hash(cookies.encode()))

    def find(self, request: Request, seen: Counter[Key]) -> SiteAnswer | None:
        """Return the recorded answer, or None.

        ``seen`` counts what an episode has asked, by each key: its n-th same request gets the n-th
        answer, and the last one afterwards.
        """
        keys = [key for key in request.keys(self.moment) if self._answers.get(key)]
        if not keys:
            return None
        # A page that runs at another speed asks at other times, so that a narrow key may be used up
        # while a wide one has answers left.
        entry = self._answers[keys[0]][-1]
        for key in reversed(keys):
            if seen[key] < len(self._answers[key]):
                entry = self._answers[key][seen[key]]
        seen.update(keys)
        return self._answer(entry)

    def keep(self, request: Request, answer: SiteAnswer, seen: Counter[Key]) -> bool:
        """Write an answer, unless an earlier episode has written one.

        Returns False when it is too large. Raises OSError.
        """
        headers = {name: value for name, value in answer.headers.items() if name not in OF_TRANSFER}
        exact = request.keys(self.moment)[0]
        size = len(answer.body)
        with self._lock:
            repeat = seen[exact]
            seen[exact] += 1
            if repeat < len(self._answers[exact]):
                return True
            if size > MAX_BODY_BYTES or self._bytes + size > MAX_RECORDING_BYTES:
                return False
            entry = _Entry(
                **request.model_dump(),
                repeat=repeat,
                status=answer.status,
                headers=headers,
                body=hashlib.sha256(answer.body).hexdigest(),
                size=size,
            )
            self._write(entry, answer.body)
            return True

    def _begin(self) -> None:
        """Write an index with its header, unless there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "bodies").mkdir(exist_ok=True)
        new_file = self.folder / f".{INDEX}.{secrets.token_hex(8)}"
        header = _Header(kind="rayloop-recording", version=1, moment=int(time.time()))
        write_whole(new_file, header.model_dump_json().encode())
        # A link replaces no file, so only one of two actors begins the index.
        with suppress(FileExistsError):
            os.link(new_file, self.folder / INDEX)
        new_file.unlink()

    def _read(self) -> int:
        """Read the index, and return the moment of the recording. Raises ConfigError."""
        index = self.folder / INDEX
        try:
            first_line, *lines = content(index, MAX_INDEX_BYTES).split(b"\n")
        except OSError as error:
            raise ConfigError(
                f"{self.folder} is not a recording: {INDEX}: {error.strerror}. browser.record makes"
                " one"
            ) from error
        try:
            header = _Header.model_validate_json(first_line)
            for line in lines:
                # A process that was killed leaves a line without an end.
                if line.endswith(b"}"):
                    self._add(_Entry.model_validate_json(line), header.moment)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "a line"
            raise ConfigError(
                f"{index} is not of a recording that this version of rayloop reads: {place}:"
                f" {first['msg']}. Record the pages again"
            ) from error
        return header.moment

    def _add(self, entry: _Entry, moment: int) -> None:
        exact, *wider = entry.keys(moment)
        # Two actors may have recorded the same; the first one's answer counts.
        if entry.repeat < len(self._answers[exact]):
            return
        for key in (exact, *wider):
            self._answers[key].append(entry)
        self._bytes += entry.size

    def _write(self, entry: _Entry, body: bytes) -> None:
        file = self.folder / "bodies" / entry.body
        if not file.exists():
            write_whole(file, body, durable=False)
        handle = os.open(self.folder / INDEX, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            # One write, so that lines of several actors do not mix.
            os.write(handle, b"\n" + entry.model_dump_json().encode())
        finally:
            os.close(handle)
        self._add(entry, self.moment)

    def _answer(self, entry: _Entry) -> SiteAnswer | None:
        body = b""
        with suppress(OSError):
            body = content(self.folder / "bodies" / entry.body, MAX_BODY_BYTES)
        if hashlib.sha256(body).hexdigest() != entry.body:
            return None
        headers = dict(entry.headers)
        if "set-cookie" in headers:
            cookies = headers["set-cookie"].splitlines()
            headers["set-cookie"] = "\n".join(self._lasting(cookie) for cookie in cookies)
        return SiteAnswer(entry.status, headers, body)

    def _lasting(self, cookie: str) -> str:
        """A cookie that was valid at the recording, without a date that has passed since."""
        expires = _EXPIRES.search(cookie)
        if expires is None:
            return cookie
        try:
            was_valid = parsedate_to_datetime(expires[1]).timestamp() > self.moment
        except ValueError:
            return cookie
        return _EXPIRES.sub("", cookie) if was_valid else cookie


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if data else ""


def _second(time_in_seconds: float) -> bytes:
    return str(int(time_in_seconds)).encode()


def _nothing(_: float) -> bytes:
    return b""


def _with_times(text: bytes, moment: int, written: Callable[[float], bytes]) -> bytes:
    """The text with its times near ``moment`` as ``written`` has them, and without drawn numbers.

    A time is a number of seconds or milliseconds. A page that adds times or drawn numbers asks for
    another address each time.
    """

    def replaced(number: re.Match[bytes]) -> bytes:
        value = float(number[0])
        for seconds in (value, value / 1000):
            if abs(seconds - moment) < CLOCK_SPREAD_S:
                return b"TIME" + written(seconds)
        return number[0]

    return _NUMBER.sub(replaced, _DRAWN.sub(b"DRAWN", text))
