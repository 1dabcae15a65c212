"""Log-probs of packed rows are those that plain transformers computes for each sequence alone,
whatever a family does with windows and logits.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rayloop.core.types import TrajectoryId
from rayloop.engines.models import load_model
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.engines.training.scorer import FrozenScorer
from tests.engines.training import trajectory

SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "sliding_window": 6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "smollm3": {"use_sliding_window": True},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 5.0},
    "cohere": {"logit_scale": 0.2},
    "cohere2": {"logit_scale": 0.2},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_log_probs_are_those_of_plain_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZES, **FAMILIES[kind])
    ).save_pretrained(tmp_path)
    shapes = [[(5, None, 3)], [(20, None, 11)], [(9, None, 6), (4, None, 5)]]
    played = [trajectory(tmp_path, number, turns) for number, turns in enumerate(shapes)]
    turns = (played[2].turns[0], *played[1].turns[1:])
    played.append(
        dataclasses.replace(played[2], id=TrajectoryId(2, 1), turns=turns)
    )  # its prompt is shared
    scorer = FrozenScorer(ModelSettings(path=str(tmp_path)), FsdpSettings(dtype="float32"))
    scored = scorer.logprobs(played)
    eager = (
        {"attn_implementation": "eager"} if kind == "gemma2" else {}
    )  # of the others SDPA computes the same
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **eager).eval()
    for one, found in zip(played, scored, strict=True):
        flat = one.flatten()
        ids, at = torch.tensor(flat.token_ids), torch.tensor(flat.loss_mask.nonzero()[0])
        with torch.no_grad():
            wanted = plain(ids[None]).logits[0].log_softmax(-1)[at - 1, ids[at]]
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=1e-5)


def test_scores_of_attention_that_are_capped_are_never_computed_by_sdpa(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma2", **SIZES).save_pretrained(tmp_path)
    assert (
        load_model(ModelSettings(path=str(tmp_path)), weights=False).config._attn_implementation
        == "eager"
    )


def test_an_update_computes_without_the_dropout_of_the_configuration(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64, resid_pdrop=0.5, attn_pdrop=0.5
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, ids = load_model(ModelSettings(path=str(tmp_path))), torch.arange(8)[None]
    torch.testing.assert_close(model.train()(ids).logits, model.eval()(ids).logits, rtol=0, atol=0)
