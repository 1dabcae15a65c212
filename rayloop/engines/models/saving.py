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
"""How files end that hold weights, in any format; those of the source are not those that are
written.
"""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Where folders keep the settings of their image processor: at the top, or of the second under
``image_processor``.
"""


def save_model(
    source: str | Path,
    target: Path,
    tensors: Mapping[str, Tensor],
    dtype: str | None = None,
    *,
    limits: ModelSettings | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``tensors`` (checkpoint names) as a model folder, with the other files of the folder
    ``source``. ``dtype``: float32 or bfloat16, None: the tensors' own, which is one. ``limits``:
    the run's, for the image processor and ``generate``: the model then sees pictures at the sizes
    that it was trained with, and ends answers where it did. ``config``: keys of config.json that
    change, also in the language model's part.
    """
    target.mkdir(parents=True, exist_ok=True)
    if dtype is not None:
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    for file in Path(source).iterdir():
        # An index or adapters of the source would make loaders look for its weights.
        weights = (
            file.suffix in WEIGHTS or file.name.endswith(".index.json") or file.name == ADAPTERS[0]
        )
        if file.is_file() and not weights:
            shutil.copyfile(file, target / file.name)
    (kept,) = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    _change_config(target / "config.json", kept, config or {})
    if limits is not None:
        _set_limits(target, limits)
        _set_ends(target, limits)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        target / WHOLE_MODEL,
        {"format": "pt"},
    )
    shutil.copymode(
        target / "config.json", target / WHOLE_MODEL
    )  # as the umask says; safetensors makes files private


def _change_config(file: Path, dtype: str, changes: Mapping[str, Any]) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    found |= {**changes, "dtype": dtype}
    if changes and isinstance(found.get("text_config"), dict):
        found["text_config"] |= changes
    _write(file, found)


def _set_limits(folder: Path, settings: ModelSettings) -> None:
    """Set the smallest and the largest number of pixels wherever the folder says them."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not has_vision(config):
        return
    limits = in_both_spellings(image_limits(settings, config))
    for file in (folder / name for name in PROCESSORS):
        if not file.is_file():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        # A loader may read either file, so both get the limits.
        whole = file.name == PROCESSORS[0]
        part = found if whole else found.get("image_processor")
        if isinstance(part, dict):
            part |= limits
            _write(file, found)


def _set_ends(folder: Path, settings: ModelSettings) -> None:
    """Let transformers and vLLM end an answer at the tokens at which the run did: a template may
    end turns with another one than the base model's texts.
    """
    file = folder / "generation_config.json"
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = described.get("text_config") or described
    # A new file hides what transformers would otherwise take from config.json.
    kept = {
        name: text[name] for name in ("bos_token_id", "pad_token_id") if text.get(name) is not None
    }
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else kept
    _write(file, {**found, "eos_token_id": sorted(Renderer(settings).end_tokens)})


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
