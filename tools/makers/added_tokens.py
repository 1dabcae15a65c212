"""Adds tokens to a model, each with the embedding of an existing token."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForImageTextToText
from transformers.utils.logging import disable_progress_bar

from rayloop.core.failures import ConfigError
from rayloop.engines.tiny_vlm import VOCABULARY_MULTIPLE


def add_tokens(model: str | Path, out: str | Path, tokens: Mapping[str, str]) -> Path:
    """Copy the model folder to ``out``, which is made anew, with ``tokens``: new text -> a single
    token of the model, whose embedding it starts with. Weights are float32. Raises ConfigError for
    a token that the model lacks.
    """
    model, out = Path(model), Path(out)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    if unknown := [known for known in tokens.values() if tokenizer.token_to_id(known) is None]:
        raise ConfigError(f"{model} has no token {unknown[0]!r} for a new one to begin with")
    first = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    disable_progress_bar()
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    before = network.get_input_embeddings().weight.detach().clone()
    size = -(-tokenizer.get_vocab_size() // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    network.resize_token_embeddings(size, mean_resizing=False)
    embeddings = network.get_input_embeddings().weight.detach()
    embeddings[first:] = 0.0
    for index, known in enumerate(tokens.values()):
        embeddings[first + index] = before[tokenizer.token_to_id(known)]
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(model, out)
    network.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    return out
