"""Folders as web sites: ``http://pages/form.html`` is a file of a folder here, without a server and without a network."""

from __future__ import annotations

import functools
import mimetypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

KEPT = 512
"""Files kept in memory, the last ones used."""
LARGEST = 32 << 20
"""Bytes of a file; larger ones are not there."""


@dataclass(frozen=True)
class Files:
    """``hosts``: host name -> folder. Nothing outside of the folders is reachable, through ``..`` or links either.

    ``sites``: hosts, with their ports if any, that are real ones.
    """

    hosts: Mapping[str, str]
    sites: frozenset[str] = frozenset()

    def passes(self, url: str) -> bool:
        """Whether the address is on one of ``sites``."""
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.netloc in self.sites

    def serves(self, url: str) -> bool:
        """Whether the address is one of the hosts, so that a missing file is a mistake of the page, no refusal."""
        parts = urlsplit(url)
        return parts.scheme == "http" and parts.netloc in self.hosts

    def find(self, url: str) -> tuple[bytes, str] | None:
        """Content and media type of an address of ``hosts``; None when there is no such file. A folder is its index.html."""
        parts = urlsplit(url)
        root = os.path.realpath(self.hosts[parts.netloc])
        path = os.path.realpath(os.path.join(root, unquote(parts.path).lstrip("/")))
        if os.path.isdir(path):
            path = os.path.join(path, "index.html")
        if not Path(path).is_relative_to(root) or not os.path.isfile(path) or os.path.getsize(path) > LARGEST:
            return None
        return _content(path, os.stat(path).st_mtime_ns), mimetypes.guess_type(path)[0] or "text/plain"


@functools.lru_cache(KEPT)
def _content(path: str, _changed: int) -> bytes:
    return Path(path).read_bytes()
