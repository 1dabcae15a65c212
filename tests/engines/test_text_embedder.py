"""The embedder in the process: a tiny BERT made here, pooled as sentence-transformers does, and
what is wrong with a folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.engines.text_embedder import TextEmbedder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "read", "the", "bar", "sum", "is", "ten"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(made)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    BertModel(
        BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)
    ).save_pretrained(made)
    (made / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 8}), encoding="utf-8"
    )
    return made


def embedder(folder: Path) -> TextEmbedder:
    made: TextEmbedder = Component.model_validate(
        {"use": "rayloop.engines.text_embedder:TextEmbedder", "with": {"model": str(folder)}}
    ).build()
    return made


def test_vectors_are_means_over_the_texts_own_tokens(folder: Path) -> None:
    texts = ["read the bar", "sum", ""]
    together = np.array(embedder(folder).embed(texts))
    alone = np.array([embedder(folder).embed([text])[0] for text in texts])
    assert np.allclose(together, alone, atol=1e-6), "padding does not count"
    model = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([[2, 5, 6, 7, 3]])).last_hidden_state[0].mean(0).numpy()
    assert np.allclose(together[0], hidden / np.linalg.norm(hidden), atol=1e-6)
    assert np.allclose(np.linalg.norm(together, axis=1), 1.0)


def test_texts_are_cut_at_the_models_own_limit(folder: Path) -> None:
    long, cut = embedder(folder).embed(["sum is " * 20, "sum is sum is sum is"])
    assert np.allclose(long, cut, atol=1e-6)


def test_a_folder_without_a_model_and_a_gpu_that_is_not_there_are_named(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"embedder model {tmp_path}"):
        embedder(tmp_path)
    with pytest.raises(
        ConfigError,
        match=(
            r"^reward\.source\.with\.embedder\.with\.model: no/such/name is neither a folder here nor a"
            r" name"
        ),
    ):
        embedder(Path("no/such/name"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU"):
            TextEmbedder(TextEmbedder.Settings(model=str(folder), device="cuda"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        RuntimeError("CUDA error: device-side"),
        MemoryError("no room"),
    ],
)
def test_a_device_that_fails_is_never_a_reward(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    made = embedder(folder)
    monkeypatch.setattr(made, "_model", fails)
    with pytest.raises(
        InfrastructureFailure, match=rf"the embedder failed on cpu: {type(error).__name__}: {error}"
    ):
        made.embed(["read the bar"])


@pytest.mark.parametrize("text", ["{", "[8]", '{"max_seq_length": "long"}'])
def test_a_broken_limit_names_its_file(folder: Path, tmp_path: Path, text: str) -> None:
    broken = tmp_path / "bert"
    shutil.copytree(folder, broken)
    (broken / "sentence_bert_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{broken}/sentence_bert_config\.json cannot be read: "):
        embedder(broken)
