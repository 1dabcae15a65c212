"""The tokenizer of a model; without transformers, which imports torch."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from rayloop.core.failures import ConfigError
from rayloop.core.types import TokenIds


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. Raises ConfigError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; save it with a fast tokenizer")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def shown(tokenizer: Tokenizer, token_ids: TokenIds) -> str:
    """For people: the text with its special tokens; of a run of equal ones, as an image has, the first and how many there are."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    texts = []
    for alike, run in groupby(token_ids, key=lambda token: token if token in special else None):
        ids = list(run)
        many = alike is not None and len(ids) > 1
        text = tokenizer.decode(ids[:1] if many else ids, skip_special_tokens=False)
        texts.append(f"{text}×{len(ids)}" if many else text)
    return "".join(texts)
