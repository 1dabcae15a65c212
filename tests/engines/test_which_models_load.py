"""Which models load and which are refused, by transformers' ``model_type``: the README's table is
what this file finds.

``python -m tests.engines.test_which_models_load`` prints it. The test runs that as a process of its
own: the models fill hundreds of GB of addresses, and Linux forks no process with an area of more
than the memory of the machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict

from transformers import AutoConfig

from rayloop.config.model import ModelSettings
from rayloop.core.failures import ConfigError
from rayloop.engines.models import has_vision, load_model
from tests.support.runs import ROOT

KINDS = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "gemma3_text",
    "phi3",
    "smollm3",
    "glm4",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "gemma3",
    "gemma4",
    "internvl",
    "glm4v",
    "llava_onevision",
    "qwen3_moe",
    "qwen3_vl_moe",
    "mixtral",
    "kimi_k25",
)
VOCABULARY = 1024
LOADS_TEXT, LOADS_IMAGES = "load: text", "load: text and images"
OTHER_IMAGES, EXPERTS = "refused: other images", "refused: other experts"


def answer(kind: str) -> str:
    """What loading a model of this kind says, in the default sizes of its configuration but few
    tokens, and without weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(kind)
        if ((text := config.get_text_config()).pad_token_id or 0) < VOCABULARY:
            text.vocab_size = VOCABULARY  # embeddings are on the CPU for a moment
        config.save_pretrained(folder)
        try:
            load_model(ModelSettings(path=folder), weights=False)
        except ConfigError as error:
            return (
                EXPERTS
                if "is a mixture of" in str(error)
                else OTHER_IMAGES
                if "images of" in str(error)
                else str(error)
            )
    return LOADS_IMAGES if has_vision(config) else LOADS_TEXT


def table() -> str:
    found = defaultdict(list)
    for kind in KINDS:
        found[answer(kind)].append(f"`{kind}`")
    rows = [
        f"| {said} | {', '.join(found[said])} |"
        for said in (LOADS_TEXT, LOADS_IMAGES, OTHER_IMAGES, EXPERTS)
    ]
    assert sum(map(len, found.values())) == sum(row.count("`") // 2 for row in rows), found
    return "\n".join(["| model | `model_type` |", "|---|---|", *rows])


def test_the_readme_says_which_models_load() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "tests.engines.test_which_models_load"]
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=240
    )
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout in readme, f"put this into README.md:\n{printed.stdout}"


if __name__ == "__main__":
    print(table())
