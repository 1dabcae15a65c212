"""Makes a tiny model folder: Qwen2.5-VL (or text-only Qwen2) with random weights and a tokenizer.

The layout is that of the real checkpoint, so that transformers and vLLM load it; only the sizes
differ.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen2.5-VL's special tokens, in its order."""

CHAT_TEMPLATE = Path(__file__).with_name("tiny_chat.jinja").read_text(encoding="utf-8")
"""Qwen2.5-VL's ChatML, without its default system message."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
"""Mean of red, green and blue by which Qwen2.5-VL normalises pixels."""
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Standard deviation of red, green and blue by which Qwen2.5-VL normalises pixels."""

PATCH_PIXELS = 14
MERGED_PATCHES = 2
TEMPORAL_PATCH = 2
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySizes:
    """Sizes of the tiny model; the defaults give 2 to 3 M parameters.

    Heads are at least 32 wide, which vLLM needs.
    """

    vocabulary: int = 1024
    """Upper bound of the trained BPE entries, special tokens included, ``extra_tokens`` not."""
    hidden: int = 192
    layers: int = 4
    heads: int = 3
    kv_heads: int = 1
    intermediate: int = 640
    vision_hidden: int = 96
    vision_depth: int = 3
    vision_heads: int = 3
    vision_intermediate: int = 288
    vision_window: int = 56
    max_positions: int = 8192
    tied: bool = True
    rope_theta: float = 10.0
    """Base of the rotary frequencies.

    M-RoPE gives width the lowest ones: at 1e4 the angle across a small image vanishes and grounding
    fails.
    """
    init: float = 0.05
    """Standard deviation of the initial weights; at this width 0.02 learns more slowly."""


def write_tiny_vlm(
    folder: str | Path,
    texts: Iterable[str],
    *,
    vision: bool = True,
    seed: int = 0,
    extra_tokens: Sequence[str] = (),
    image_mean: Sequence[float] = CLIP_MEAN,
    image_std: Sequence[float] = CLIP_STD,
    **sizes: Any,
) -> Path:
    """Write a model folder and return its path.

    Equal arguments give equal files. ``texts`` train the tokenizer; ``extra_tokens`` become one
    token each; ``image_mean`` and ``image_std`` (red, green, blue, 0..1) normalise pixels;
    ``sizes`` are fields of ``TinySizes``; ``vision=False`` writes a text-only Qwen2ForCausalLM.
    Raises TypeError for an unknown size.
    """
    folder = Path(folder)
    size = TinySizes(**sizes)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(texts, size.vocabulary, extra_tokens)
    # The caller's random state stays as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _vision_model(tokenizer, size) if vision else _text_model(tokenizer, size)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if vision:
        text = json.dumps(_image_processor(image_mean, image_std), indent=2)
        (folder / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")
    return folder


def _tokenizer(
    texts: Iterable[str], vocabulary: int, extra_tokens: Sequence[str]
) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose numbers are single digits, like Qwen2.5's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        # All bytes have a token, so that any text can be
        # read; sorted, since their order is not fixed.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in extra_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[
            token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")
        ],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _text_config(tokenizer: PreTrainedTokenizerFast, size: TinySizes) -> dict[str, Any]:
    return {
        # The size is rounded up like the large models', whose tables also have rows without a
        # token.
        "vocab_size": -(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": size.max_positions,
        "initializer_range": size.init,
        "tie_word_embeddings": size.tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _text_model(tokenizer: PreTrainedTokenizerFast, size: TinySizes) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": size.rope_theta}
    config = Qwen2Config(**_text_config(tokenizer, size), rope_parameters=rope)
    return Qwen2ForCausalLM(config).float()


def _vision_model(tokenizer: PreTrainedTokenizerFast, size: TinySizes) -> PreTrainedModel:
    pairs = size.hidden // size.heads // 2
    # Qwen2.5-VL splits the rotary pairs into 2/8 time, 3/8 height, 3/8 width.
    sides = pairs * 3 // 8
    rope = {
        "rope_type": "default",
        "rope_theta": size.rope_theta,
        "mrope_section": [pairs - 2 * sides, sides, sides],
    }
    vision = {
        "depth": size.vision_depth,
        "hidden_size": size.vision_hidden,
        "num_heads": size.vision_heads,
        "intermediate_size": size.vision_intermediate,
        "out_hidden_size": size.hidden,
        "patch_size": PATCH_PIXELS,
        "spatial_merge_size": MERGED_PATCHES,
        "temporal_patch_size": TEMPORAL_PATCH,
        "window_size": size.vision_window,
        "fullatt_block_indexes": list(range(1, size.vision_depth, 2)),
        "initializer_range": size.init,
    }
    identifier = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={**_text_config(tokenizer, size), "rope_parameters": rope},
        vision_config=vision,
        image_token_id=identifier("<|image_pad|>"),
        video_token_id=identifier("<|video_pad|>"),
        vision_start_token_id=identifier("<|vision_start|>"),
        vision_end_token_id=identifier("<|vision_end|>"),
        tie_word_embeddings=size.tied,
    )
    return Qwen2_5_VLForConditionalGeneration(config).float()


def _image_processor(mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """Return a preprocessor_config.json like Qwen2.5-VL's.

    The pixel limits are the defaults of ``ModelSettings``.
    """
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 784,
        "max_pixels": 1_003_520,
        "patch_size": PATCH_PIXELS,
        "temporal_patch_size": TEMPORAL_PATCH,
        "merge_size": MERGED_PATCHES,
        "image_mean": list(mean),
        "image_std": list(std),
    }
