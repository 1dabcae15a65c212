"""Which files a path stands for now: the same folder, or the same name on the Hub, may hold another model tomorrow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

WHOLE = 2**26
"""Bytes up to which a file is hashed as a whole."""
BLOCKS, BLOCK = 16, 2**16
"""A larger one is hashed by its size and at so many places, so many bytes at each."""


def hashed(files: Iterable[Path]) -> str:
    """16 hex digits over the names, sizes and contents of the files that exist, in their order."""
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with open(file, "rb") as content:
            if size <= WHOLE:
                digest.update(content.read())
                continue
            for number in range(BLOCKS):
                content.seek((size - BLOCK) * number // (BLOCKS - 1))
                digest.update(content.read(BLOCK))
    return digest.hexdigest()[:16]


def model_identity(model: str, revision: str | None = None) -> dict[str, str]:
    """Of a folder the hash of its files, of a Hub's model the commit that was loaded (call it afterwards)."""
    folder = Path(model)
    if folder.is_dir():
        return {"files": hashed(sorted(folder.iterdir()))}
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return {"commit": Path(config).parent.name if isinstance(config, str) else f"unknown of {revision}"}
