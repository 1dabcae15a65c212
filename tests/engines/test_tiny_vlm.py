"""The tiny model folder is a real checkpoint: it loads, has the promised size and keeps Qwen's
tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from benchmarks.gpu.models import TEXT_7B, TINY, VLM_3B
from rayloop.engines.tiny_vlm import SPECIAL_TOKENS, TinySizes, write_tiny_vlm
from tests.engines.training import SMALL

TEXTS = ["Select the option 42 and press OK.", "Größe: 3,5 cm"] * 20


def test_default_size_and_heads(tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(write_tiny_vlm(tmp_path, TEXTS))
    text, vision = model.config.text_config, model.config.vision_config
    assert 2e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 6e6
    assert text.hidden_size // text.num_attention_heads >= 32
    assert vision.hidden_size // vision.num_heads >= 32
    assert text.vocab_size % 64 == 0
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("sizes", [{}, SMALL, TINY, VLM_3B, TEXT_7B])
def test_heads_are_of_a_width_that_flash_attention_takes(sizes: dict[str, Any]) -> None:
    """Models of the tests and probes: multiples of 8 up to 256 (vLLM's FlashAttention), 32 at least
    (vLLM's CPU backend).
    """
    size = TinySizes(**sizes)
    for width, heads in ((size.hidden, size.heads), (size.vision_hidden, size.vision_heads)):
        assert width % heads == 0
        assert width // heads in range(32, 257, 8)


def test_equal_arguments_give_equal_files(tmp_path: Path) -> None:
    first, again = (
        write_tiny_vlm(tmp_path / "1", TEXTS, seed=3),
        write_tiny_vlm(tmp_path / "2", TEXTS, seed=3),
    )
    other = write_tiny_vlm(tmp_path / "3", TEXTS, seed=4)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_writing_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    write_tiny_vlm(tmp_path, TEXTS, seed=9)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        write_tiny_vlm(tmp_path, TEXTS, extra_tokens=["0.25", "<bbox>["])
    )
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    assert len(tokenizer.encode("<bbox>[0.25")) == 2
    assert len(tokenizer.encode("1234")) == 4
    for text in ("Größe 42, 漢字 🙂\n\ttab", "<bbox>[0.25]", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_vlm(tmp_path, TEXTS))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "See "}, {"type": "image"}]},
        {"role": "assistant", "content": "zoom"},
        {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "done"}]},
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\nSee {image}<|im_end|>\n"
        "<|im_start|>assistant\nzoom<|im_end|>\n"
        f"<|im_start|>tool\n{image}done<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_text_only_and_untied(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, TEXTS, vision=False, tied=False, hidden=128, heads=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert not (folder / "preprocessor_config.json").exists()


def test_unknown_size_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="hiden"):
        write_tiny_vlm(tmp_path, TEXTS, hiden=3)
