"""Low-rank adapters in the trainer. peft is imported where it is used: a trainer without adapters starts without it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rayloop.core.failures import ConfigError
from rayloop.core.model_families import UNADAPTED, experts
from rayloop.engines.models import model_groups
from rayloop.engines.settings import LoraSettings

logger = logging.getLogger(__name__)

ADAPTER = "default"


def add_adapters(model: PreTrainedModel, settings: LoraSettings, vision: bool, checkpoint_names: Mapping[str, str]) -> None:
    """Freeze the model and put adapters on its linear layers named in ``targets``, in place; on those of the vision tower, partly
    of the same names, only with ``vision``. Raises ConfigError when there is no layer to adapt."""
    from peft import LoraConfig, inject_adapter_in_model

    groups = model_groups(checkpoint_names.values())
    in_vision = {*groups.get("vision", ()), *groups.get("merger", ())}
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and (vision or checkpoint_names[f"{name}.weight"] not in in_vision)
    ]
    targets = [name for name in linear if name.rpartition(".")[2] in settings.targets] or linear
    if not targets:
        raise ConfigError(f"policy.engine.lora: {type(model).__name__} has no linear layer to adapt")
    if experts(model.config.get_text_config().to_dict()):
        logger.warning("policy.engine.lora: %s", UNADAPTED)
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=targets, bias="none"
    )
    inject_adapter_in_model(config, model, ADAPTER)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters: their scale is 0 inside. (peft's own switch also changes ``requires_grad``.)"""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model belongs to an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """A parameter's name before ``add_adapters``."""
    return name.replace(".base_layer.", ".")


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of the two adapter matrices, down [rank, in] and up [out, rank], of the weight with this base name."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.{ADAPTER}.weight", f"{layer}.lora_B.{ADAPTER}.weight"


def merged(weight: Tensor, down: Tensor, up: Tensor, settings: LoraSettings) -> Tensor:
    """``weight + alpha / rank * up @ down``, a new tensor (Hu et al. 2021, "LoRA")."""
    return weight + torch.mm(up, down) * (settings.alpha / settings.rank)
