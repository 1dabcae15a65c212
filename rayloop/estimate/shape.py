"""How large a model is: its parameters by tensor, from the headers of its files; nothing is loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayloop.chat.tokenizer import read_json
from rayloop.core.failures import ConfigError
from rayloop.core.model_families import VISION
from rayloop.core.model_files import resolve
from rayloop.engines.settings import FsdpSettings, LoraSettings


@dataclass(frozen=True)
class Shape:
    """``tensors``: name -> sizes; ``config``: the language model's part of config.json; ``vision``:
    the tower's, or empty.
    """

    tensors: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    vision: Mapping[str, Any]

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return sum(map(math.prod, self.tensors.values()))

    @property
    def vision_parameters(self) -> int:
        """Parameters of the vision tower."""
        return sum(math.prod(size) for name, size in self.tensors.items() if _of_vision(name))

    def trained(self, engine: FsdpSettings) -> int:
        """Parameters with a gradient: all, those outside a frozen tower, or those of the adapters."""
        if engine.lora is not None:
            return self.adapters(engine.lora, engine.trains_vision)
        return self.parameters - (0 if engine.trains_vision else self.vision_parameters)

    def adapters(self, lora: LoraSettings, vision: bool) -> int:
        """rank * (inputs + outputs) for every linear layer that is adapted; experts are none."""
        adapted = (
            size
            for name, size in self.tensors.items()
            if len(size) == 2
            and ".experts." not in name
            and name.removesuffix(".weight").rpartition(".")[2] in lora.targets
            and (vision or not _of_vision(name))
        )
        return sum(lora.rank * sum(size) for size in adapted)

    def gathered(self, each: int, master: int, trained: bool) -> int:
        """Bytes that FSDP has whole at once, ``each`` and ``master`` for a number: the head and
        what is in no unit, one layer, and if ``trained`` the gradients of the head and, in
        ``master``, of the layer. A head that is no embedding is gone when the layers' gradients
        come, but for its own in ``master``, which are then reduced.
        """
        layered = sum(
            math.prod(size)
            for name, size in self.tensors.items()
            if ".layers." in name or ".blocks." in name
        )
        text = sum(
            math.prod(size)
            for name, size in self.tensors.items()
            if ".layers." in name and not _of_vision(name)
        )
        layer, root = text // int(self.config["num_hidden_layers"]), self.parameters - layered
        head = int(self.config["vocab_size"]) * int(self.config["hidden_size"])
        untied = any(name.endswith("lm_head.weight") for name in self.tensors)
        root -= head * untied
        if trained and untied:
            return each * (root - head + layer) + master * head
        return each * (root + layer) + (each * min(head, root) + master * layer if trained else 0)

    @property
    def cache(self) -> int:
        """Numbers that one token needs in the cache of keys and values."""
        heads = int(self.config["num_attention_heads"])
        head = int(self.config.get("head_dim") or self.config["hidden_size"] // heads)
        return (
            2
            * int(self.config["num_hidden_layers"])
            * int(self.config.get("num_key_value_heads", heads))
            * head
        )


def _of_vision(name: str) -> bool:
    return any(part in f"{name}." for part in VISION)


def read_shape(model: str, revision: str | None = None, key: str = "model.path") -> Shape:
    """Of a local folder, or a model of the Hub: only the weights' headers are downloaded.

    Raises ConfigError that names ``key``.
    """
    found = resolve(model, revision, key=key)
    if not (found.folder / "config.json").is_file():
        raise ConfigError(f"{key}: {model} has no config.json")
    config = read_json(found.folder / "config.json")
    if found.whole:
        return _shape({name: tensor.shape for name, tensor in found.stored().items()}, config)
    if found.commit is None:
        raise ConfigError(
            f"{key}: {model} has no *.safetensors, or lacks some that its index names"
        )
    try:
        from huggingface_hub import get_safetensors_metadata

        metadata = get_safetensors_metadata(model, revision=found.commit).files_metadata.values()
        return _shape(
            {name: tuple(t.shape) for one in metadata for name, t in one.tensors.items()}, config
        )
    except (
        Exception
    ) as error:  # no network, no such model, no permission: its classes are many, and change
        raise ConfigError(
            f"{key}: {model} is not in the cache, and the Hub did not say how large it is"
            f" ({type(error).__name__}). On a machine that reaches it: hf download {model}"
            f" --local-dir FOLDER, then {key}=FOLDER"
        ) from error


def _shape(tensors: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Shape:
    return Shape(tensors, config.get("text_config") or config, config.get("vision_config") or {})
