"""Published chat templates with a tokenizer that has the special tokens of their models, in the
form of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEMPLATES = Path(__file__).parents[3] / "tests/published"
TEXTS = ["what is two plus two? the answer is four\n\n", "question answer 0123456789"] * 5
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen's and Llama 3's tokenizers cut a text before they merge."""
IM = ("<|im_start|>", "<|im_end|>")
HERMES = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
MISTRAL = tuple(
    f"[{slash}{name}]"
    for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS")
    for slash in ("", "/")
)
DEEPSEEK_TOOLS = tuple(
    f"<｜tool▁{name}｜>"
    for name in (
        *(
            f"{what}▁{end}"
            for what in ("calls", "call", "outputs", "output")
            for end in ("begin", "end")
        ),
        "sep",
    )
)
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>")
GEMMA4 = (
    "<|turn>",
    "<turn|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)
COHERE = tuple(
    f"<|{name}|>"
    for name in (
        "START_OF_TURN_TOKEN",
        "USER_TOKEN",
        "SYSTEM_TOKEN",
        "CHATBOT_TOKEN",
        "START_RESPONSE",
        "END_RESPONSE",
    )
)


@dataclass(frozen=True)
class Published:
    """A template ``name``.jinja, the models that have it, their ``kinds`` (model_type) here, and
    their tokenizer's tokens: ``eos``, ``bos``, other ``special`` ones, ``added`` ones that are no
    special tokens. ``form``: one of ``FORMS``.
    """

    name: str
    models: str
    kinds: tuple[str, ...]
    eos: str
    bos: str = ""
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    form: str = "byte level"


PUBLISHED = (
    Published("qwen2_5", "Qwen2.5", ("qwen2",), "<|im_end|>", special=IM, added=HERMES[:2]),
    Published(
        "qwen2_5_vl",
        "Qwen2-VL, Qwen2.5-VL",
        ("qwen2_vl", "qwen2_5_vl"),
        "<|im_end|>",
        special=(*IM, *VISION),
    ),
    Published("qwen3", "Qwen3", ("qwen3", "qwen3_moe"), "<|im_end|>", special=IM, added=HERMES),
    Published(
        "qwen3_instruct_2507",
        "Qwen3-2507",
        ("qwen3", "qwen3_moe"),
        "<|im_end|>",
        special=IM,
        added=HERMES,
    ),
    Published(
        "qwen3_vl",
        "Qwen3-VL",
        ("qwen3_vl", "qwen3_vl_moe"),
        "<|im_end|>",
        special=(*IM, *VISION),
        added=HERMES,
    ),
    Published(
        "qwen3_5_think",
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_moe"),
        "<|im_end|>",
        special=(*IM, *VISION),
        added=HERMES,
    ),
    Published(
        "qwen3_5_nothink",
        "Qwen3.5, small",
        ("qwen3_5",),
        "<|im_end|>",
        special=(*IM, *VISION),
        added=HERMES,
    ),
    Published(
        "qwen3_6",
        "Qwen3.6",
        ("qwen3_5", "qwen3_5_moe"),
        "<|im_end|>",
        special=(*IM, *VISION),
        added=HERMES,
    ),
    Published("llama3", "Llama 3", ("llama",), "<|eot_id|>", LLAMA[0], LLAMA),
    Published("llama3_2", "Llama 3.2", ("llama",), "<|eot_id|>", LLAMA[0], LLAMA),
    Published(
        "mistral_v2v3",
        "Mistral 7B v0.3",
        ("mistral",),
        "</s>",
        "<s>",
        MISTRAL,
        form="prepended blank",
    ),
    Published(
        "mistral_v3_tekken", "Mistral Nemo", ("mistral",), "</s>", "<s>", (*MISTRAL, "[TOOL_CALLS]")
    ),
    Published(
        "gemma3",
        "Gemma 3",
        ("gemma3_text",),
        "<eos>",
        "<bos>",
        ("<start_of_turn>", "<end_of_turn>"),
        form="no blank",
    ),
    Published("phi3", "Phi-3", ("phi3",), "<|endoftext|>", "<s>", PHI, form="tokens that strip"),
    Published(
        "phi3_5", "Phi-3.5", ("phi3",), "<|endoftext|>", "<s>", PHI, form="tokens that strip"
    ),
    Published("glm4moe", "GLM-4.5", (), "<|endoftext|>", special=GLM, added=HERMES),
    Published("gptoss", "gpt-oss", (), "<|return|>", "<|startoftext|>", HARMONY),
    Published(
        "deepseekv3",
        "DeepSeek-V3",
        (),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>"),
        (*DEEPSEEK_TOOLS, "<think>", "</think>"),
    ),
    Published("nemotron_3_nano", "Nemotron 3 Nano", (), "<|im_end|>", "<s>", IM, HERMES),
    Published("gemma4_v5", "Gemma 4", (), "<eos>", "<bos>", GEMMA4, form="no blank"),
    Published(
        "lfm2_2_5",
        "LFM2.5",
        (),
        "<|im_end|>",
        "<|startoftext|>",
        IM,
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Published("cohere2", "Cohere 2", (), "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", COHERE),
    Published("idefics3", "Idefics 3", (), "<end_of_utterance>", "<|begin_of_text|>"),
    Published("smolvlm", "SmolVLM", (), "<end_of_utterance>", "<|im_start|>"),
    Published("llava_next", "LLaVA-NeXT", (), "</s>", "<s>", form="first blank"),
)
"""Those of the README's table first."""


def with_form(form: str, special: Sequence[str], added: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of one of ``FORMS``."""
    blank = "▁"
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    if form == "byte level":
        made = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(WORDS), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, show_progress=False
        )
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=["<unk>", *bytes_], show_progress=False
        )
        blanks: list[Any] = [normalizers.Replace(" ", blank)]
        if form in ("prepended blank", "tokens that strip"):
            blanks.insert(0, normalizers.Prepend(blank))
        if form in ("first blank", "blank everywhere"):
            scheme = "first" if form == "first blank" else "always"
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        else:
            made.normalizer = normalizers.Sequence(blanks)
        made.decoder = decoders.Sequence(
            [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    made.train_from_iterator(TEXTS, trainer)
    plain = json.loads(made.to_str())
    plain["added_tokens"] = []  # the trainer counts those of single bytes among the special tokens
    made = Tokenizer.from_str(json.dumps(plain))
    strips = form == "tokens that strip"
    made.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=strips) for text in special]
    )
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return made


FORMS = {
    "byte level": "GPT-2, Llama 3, Qwen, DeepSeek, gpt-oss",
    "no blank": "Gemma: blanks are letters, none is added",
    "prepended blank": (
        "Llama 2, Mistral 7B, Zephyr, TinyLlama: a normaliser puts a blank before each piece"
    ),
    "tokens that strip": "Phi-3: the same, and special tokens take the white space behind them",
    "first blank": "newer conversions of Llama and Mistral: only the text's beginning gets a blank",
    "blank everywhere": "Metaspace with `prepend_scheme: always`",
}
"""Forms of tokenizers, and whose they are."""


@contextmanager
def folder_of(one: Published, template: str | None = None) -> Iterator[tuple[Path, Any]]:
    """A model folder with the template and its tokenizer, until the block ends, and the tokenizer
    as transformers loads it.
    """
    from transformers import PreTrainedTokenizerFast

    special = dict.fromkeys((one.eos, *filter(None, [one.bos]), *one.special))
    made = with_form(one.form, list(special), one.added)
    source = (
        (TEMPLATES / f"{one.name}.jinja").read_text(encoding="utf-8")
        if template is None
        else template
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=one.eos,
        **({"bos_token": one.bos} if one.bos else {}),
        chat_template=source,
    )
    with TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save_pretrained(folder)
        (folder / "config.json").write_text(
            json.dumps({"model_type": "llama", "vocab_size": len(theirs)}), encoding="utf-8"
        )
        yield folder, theirs
