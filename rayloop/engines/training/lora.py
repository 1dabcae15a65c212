"""What is trained of a model: low-rank adapters, or parts of it. peft is imported where it is used:
a trainer without adapters starts without it.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rayloop.core.failures import ConfigError
from rayloop.core.model_families import UNADAPTED, experts
from rayloop.engines.models import has_vision, model_groups
from rayloop.engines.settings import FsdpSettings, LoraSettings

logger = logging.getLogger(__name__)

ADAPTER = "default"


def choose_trainable(
    model: PreTrainedModel, settings: FsdpSettings, names: Mapping[str, str], *, recomputes: bool
) -> None:
    """Apply freezing, adapters and, if it ``recomputes``, gradient checkpointing to a model as
    loaded. ``names``: its parameters' checkpoint names. Raises ConfigError.
    """
    if settings.train_vision is not None and not has_vision(model.config):
        raise ConfigError(
            "policy.engine.train_vision: the model has no vision tower. Leave the key out"
        )
    model.requires_grad_(True)
    if settings.lora is not None:
        add_adapters(model, settings.lora, settings.trains_vision, names)
    elif not settings.trains_vision:
        groups = model_groups(names.values())
        tower = {*groups["vision"], *groups["merger"]}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(names[name] not in tower)
    if recomputes:
        # The reentrant kind gives no gradient when its
        # inputs have none, as behind a frozen embedding.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # else a frozen tower keeps its activations, and has a backward pass
        model.disable_input_require_grads()


def add_adapters(
    model: PreTrainedModel,
    settings: LoraSettings,
    vision: bool,
    checkpoint_names: Mapping[str, str],
) -> None:
    """Freeze the model and put adapters on its linear layers named in ``targets``, in place; on
    those of the vision tower, partly of the same names, only with ``vision``. Raises ConfigError
    when there is no layer to adapt.
    """
    from peft import LoraConfig, inject_adapter_in_model

    groups = model_groups(checkpoint_names.values())
    in_vision = {*groups.get("vision", ()), *groups.get("merger", ())}
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and (vision or checkpoint_names[f"{name}.weight"] not in in_vision)
    ]

    # Like peft's ``all-linear``, which leaves the head out, where a model has other names.
    targets = [name for name in linear if name.rpartition(".")[2] in settings.targets] or linear
    if not targets:
        raise ConfigError(
            f"policy.engine.lora: {type(model).__name__} has no linear layer to adapt"
        )
    if experts(model.config.get_text_config().to_dict()):
        logger.warning("policy.engine.lora: %s", UNADAPTED)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        bias="none",
    )
    # This is done in place: a PeftModel around the model
    # would rename its parameters and hide its blocks.
    inject_adapter_in_model(config, model, ADAPTER)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters: their scale is 0 inside.

    (peft's own switch also changes ``requires_grad``.)
    """
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
    """Names of the two adapter matrices, down [rank, in] and up [out, rank], of the weight with
    this base name.
    """
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.{ADAPTER}.weight", f"{layer}.lora_B.{ADAPTER}.weight"


def is_up(name: str) -> bool:
    """Whether a parameter is the second matrix of an adapter, which is 0 at first."""
    return ".lora_B." in name


def saved_name(name: str, checkpoint_names: Mapping[str, str]) -> str:
    """The name of an adapter's matrix in peft's files, by the layer's in the checkpoint."""
    layer, _, _ = name.partition(".lora_")
    return f"base_model.model.{checkpoint_names[f'{layer}.weight'].removesuffix('weight')}lora_{'AB'[is_up(name)]}.weight"


def merged(weight: Tensor, down: Tensor, up: Tensor, settings: LoraSettings) -> Tensor:
    """``weight + alpha / rank * up @ down``, a new tensor (Hu et al. 2021, "LoRA")."""
    return weight + torch.mm(up, down) * (settings.alpha / settings.rank)
