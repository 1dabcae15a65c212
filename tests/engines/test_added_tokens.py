"""A model with more tokens: they begin as others, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from rayloop.core.failures import ConfigError
from rayloop.engines.tiny_vlm import write_tiny_vlm
from tools.makers.added_tokens import add_tokens


def test_new_tokens_begin_with_what_others_know(tmp_path: Path) -> None:
    small = {
        "hidden": 64,
        "layers": 1,
        "heads": 1,
        "intermediate": 64,
        "vision_hidden": 64,
        "vision_depth": 1,
        "vision_heads": 1,
    }
    model = write_tiny_vlm(tmp_path / "model", ["click here"], extra_tokens=["0.50"], **small)
    out = add_tokens(model, tmp_path / "out", {"(500,": "0.50", "500)": "0.50"})
    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (model, out))
    assert after.encode("(500,500)").ids == [before.get_vocab_size(), before.get_vocab_size() + 1]
    assert after.encode("click here").ids == before.encode("click here").ids
    old, new = (AutoModelForImageTextToText.from_pretrained(folder) for folder in (model, out))
    table, wider = old.get_input_embeddings().weight, new.get_input_embeddings().weight
    known = before.token_to_id("0.50")
    assert torch.equal(wider[: before.get_vocab_size()], table[: before.get_vocab_size()])
    for added in after.encode("(500,500)").ids:
        assert torch.equal(wider[added], table[known])
    assert len(wider) % 64 == 0
    assert new.config.text_config.vocab_size == len(wider)
    with pytest.raises(ConfigError, match=r"no token '0\.75'"):
        add_tokens(model, tmp_path / "other", {"(750,": "0.75"})
