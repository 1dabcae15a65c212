"""Writes weights as a model folder that transformers and vLLM load."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from rayloop.chat.rendering import Renderer
from rayloop.core.model_files import ADAPTERS, WHOLE_MODEL
from rayloop.engines.models import has_vision, image_limits, in_both_spellings
from rayloop.engines.settings import ModelSettings
from rayloop.transports.manifest import DTYPES

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
"""Endings of files that hold weights, in any format: the source's are not copied."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of the image processor: in the second under ``image_processor``."""


def save_model(
    source: str | Path,
    target: Path,
    tensors: Mapping[str, Tensor],
    dtype: str | None = None,
    *,
    limits: ModelSettings | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``tensors`` (checkpoint names) as a model folder, with the other files of ``source``.

    ``dtype``: float32 or bfloat16, None: the tensors' own, which is one. ``limits``: the run's, for
    the image processor and ``generate``: the model then sees pictures at the sizes that it was
    trained with, and ends answers where it did. ``config``: keys of config.json that change, also
    in the language model's part.
    """
    target.mkdir(parents=True, exist_ok=True)
    if dtype is not None:
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    for file in Path(source).iterdir():
        # An index or adapters of the source would make loaders look for its weights.
        is_index = file.name.endswith(".index.json") or file.name == ADAPTERS[0]
        if file.is_file() and file.suffix not in WEIGHTS and not is_index:
            shutil.copyfile(file, target / file.name)
    (common_dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    config_file = target / "config.json"
    _change_config(config_file, common_dtype, config or {})
    if limits is not None:
        _set_limits(target, limits)
        _set_ends(target, limits)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target / WHOLE_MODEL, {"format": "pt"})
    # safetensors makes files private; config.json has the mode of the umask.
    shutil.copymode(config_file, target / WHOLE_MODEL)


def _change_config(file: Path, dtype: str, changes: Mapping[str, Any]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    content |= {**changes, "dtype": dtype}
    if changes and isinstance(content.get("text_config"), dict):
        content["text_config"] |= changes
    _write(file, content)


def _set_limits(folder: Path, settings: ModelSettings) -> None:
    """Set the smallest and the largest number of pixels in each file that has them."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not has_vision(config):
        return
    limits = in_both_spellings(image_limits(settings, config))
    for file in (folder / name for name in PROCESSORS):
        if not file.is_file():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        # A loader may read either file, so both get the limits.
        is_first = file.name == PROCESSORS[0]
        part = content if is_first else content.get("image_processor")
        if isinstance(part, dict):
            part |= limits
            _write(file, content)


def _set_ends(folder: Path, settings: ModelSettings) -> None:
    """Let transformers and vLLM end an answer at the tokens at which the run did.

    A template may end turns with another token than the base model's texts.
    """
    file = folder / "generation_config.json"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    if file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
    else:
        # A new file hides what transformers would otherwise take from config.json.
        tokens = ("bos_token_id", "pad_token_id")
        content = {name: text[name] for name in tokens if text.get(name) is not None}
    _write(file, {**content, "eos_token_id": sorted(Renderer(settings).end_tokens)})


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
