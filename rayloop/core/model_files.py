"""Which model a name stands for now: the same folder, or the same name on the Hub, may hold another one tomorrow."""

from __future__ import annotations

import hashlib
from pathlib import Path

TEXTS = (".json", ".jinja", ".txt", ".model")
"""Configuration, index of the weights, tokenizer and chat template: hashed as they are. Weights count by name and size."""


def model_identity(model: str, revision: str | None = None) -> dict[str, str]:
    """Of a folder the hash of its files, of a Hub's model the commit that was loaded (call it afterwards). Reads no weights."""
    folder = Path(model)
    if folder.is_dir():
        found = hashlib.sha256()
        for file in sorted(folder.iterdir()):
            if file.suffix in TEXTS:
                found.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
            elif file.is_file():
                found.update(f"{file.name} {file.stat().st_size}".encode())
        return {"files": found.hexdigest()}
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return {"commit": Path(config).parent.name if isinstance(config, str) else f"unknown of {revision}"}
