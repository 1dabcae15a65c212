"""The size of a model: its parameters by tensor, from the headers of its files.

No weights are loaded.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rayloop.chat.tokenizer import read_json
from rayloop.core.failures import ConfigError
from rayloop.core.model_families import VISION
from rayloop.core.model_files import Resolved, resolve
from rayloop.engines.settings import FsdpSettings, LoraSettings


@dataclass(frozen=True)
class Shape:
    """The shapes of a model's tensors, and its sizes.

    ``tensors``: the sizes by name; ``config``: the language model's part of config.json;
    ``vision``: the vision tower's part, or empty.
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
        return self._count(_is_vision)

    def trained(self, engine: FsdpSettings) -> int:
        """Parameters with a gradient: all, all outside a frozen tower, or the adapters'."""
        if engine.lora is not None:
            return self.adapters(engine.lora, engine.trains_vision)
        return self.parameters - (0 if engine.trains_vision else self.vision_parameters)

    def adapters(self, lora: LoraSettings, vision: bool) -> int:
        """Parameters of the adapters: rank * (inputs + outputs) for every adapted linear layer.

        Layers of experts are not adapted; ``vision``: layers of the vision tower are.
        """
        parameters = 0
        for name, size in self.tensors.items():
            layer = name.removesuffix(".weight").rpartition(".")[2]
            is_linear = len(size) == 2 and layer in lora.targets
            is_excluded = ".experts." in name or (_is_vision(name) and not vision)
            if is_linear and not is_excluded:
                parameters += lora.rank * sum(size)
        return parameters

    def gathered(self, each: int, master: int, trained: bool) -> int:
        """Bytes that FSDP has complete at once, with ``each`` and ``master`` bytes for a number.

        They are the head and the tensors outside of units, one layer, and if ``trained`` the
        gradients of the head and, in ``master``, of the layer. A head that is not an embedding is
        freed before the layers' gradients come, except its own gradients in ``master``, which are
        then reduced.
        """
        layers = self._count(_is_text_layer)
        layer = layers // int(self.config["num_hidden_layers"])
        root = self.parameters - self._count(_is_layer)
        head = int(self.config["vocab_size"]) * int(self.config["hidden_size"])
        is_untied = any(name.endswith("lm_head.weight") for name in self.tensors)
        if is_untied:
            root -= head
        if not trained:
            return each * (root + layer)
        if is_untied:
            return each * (root - head + layer) + master * head
        return each * (root + layer) + each * min(head, root) + master * layer

    def _count(self, belongs: Callable[[str], bool]) -> int:
        """Parameters of the tensors whose name belongs to a part of the model."""
        return sum(math.prod(size) for name, size in self.tensors.items() if belongs(name))

    @property
    def cache(self) -> int:
        """Numbers that one token needs in the cache of keys and values."""
        heads = int(self.config["num_attention_heads"])
        head_size = int(self.config.get("head_dim") or self.config["hidden_size"] // heads)
        key_heads = int(self.config.get("num_key_value_heads", heads))
        keys = int(self.config["num_hidden_layers"]) * key_heads * head_size
        # A value for each key.
        return 2 * keys


def _is_vision(name: str) -> bool:
    return any(part in f"{name}." for part in VISION)


def _is_layer(name: str) -> bool:
    return ".layers." in name or ".blocks." in name


def _is_text_layer(name: str) -> bool:
    return ".layers." in name and not _is_vision(name)


@dataclass(frozen=True)
class ModelSource:
    """A model by its path. Its files and its shape are looked up once, when they are first needed.

    ``key``: the key of the path in the configuration, which errors name.
    """

    path: str
    revision: str | None = None
    key: str = "model.path"

    @cached_property
    def files(self) -> Resolved:
        """The model's files on this machine. Raises ConfigError."""
        return resolve(self.path, self.revision, key=self.key)

    @cached_property
    def shape(self) -> Shape:
        """The model's shape. Raises ConfigError.

        Only the headers of weights on the Hub are downloaded.
        """
        file = self.files.folder / "config.json"
        if not file.is_file():
            raise ConfigError(f"{self.key}: {self.path} has no config.json")
        config = read_json(file)
        text = config.get("text_config") or config
        return Shape(self._tensors(), text, config.get("vision_config") or {})

    @property
    def known_shape(self) -> Shape | None:
        """The shape; None when it cannot be read."""
        try:
            return self.shape
        except ConfigError:
            return None

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the tensors by name."""
        files = self.files
        if files.whole:
            return {name: tensor.shape for name, tensor in files.stored().items()}
        if files.commit is None:
            raise ConfigError(
                f"{self.key}: {self.path} has no *.safetensors, or lacks some that its index names"
            )
        try:
            return _tensors_on_hub(self.path, files.commit)
        # No network, no such model, no permission: the library's errors are many, and change.
        except Exception as error:
            raise ConfigError(
                f"{self.key}: {self.path} is not in the cache, and the Hub did not say how large it"
                f" is ({type(error).__name__}). On a machine that reaches it: hf download"
                f" {self.path} --local-dir FOLDER, then {self.key}=FOLDER"
            ) from error


def _tensors_on_hub(model: str, commit: str) -> dict[str, tuple[int, ...]]:
    """The sizes of the tensors of a model on the Hub, from the headers of its files."""
    from huggingface_hub import get_safetensors_metadata

    metadata = get_safetensors_metadata(model, revision=commit)
    tensors = {}
    for file in metadata.files_metadata.values():
        for name, tensor in file.tensors.items():
            tensors[name] = tuple(tensor.shape)
    return tensors
