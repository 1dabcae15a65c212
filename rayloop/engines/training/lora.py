"""The trained part of a model: low-rank adapters, or some of its parameters.

peft is imported where it is used: a trainer without adapters starts without it.
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
from rayloop.engines.training.sharding import gather

logger = logging.getLogger(__name__)

ADAPTER = "default"


def choose_trainable(
    model: PreTrainedModel, settings: FsdpSettings, names: Mapping[str, str], *, recomputes: bool
) -> None:
    """Apply freezing, adapters and, if it ``recomputes``, gradient checkpointing to a loaded model.

    ``names``: its parameters' checkpoint names. Raises ConfigError.
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
        # Otherwise a frozen tower would keep its activations, and have a backward pass.
        model.disable_input_require_grads()


def add_adapters(
    model: PreTrainedModel,
    settings: LoraSettings,
    vision: bool,
    checkpoint_names: Mapping[str, str],
) -> None:
    """Freeze the model and put adapters on its linear layers named in ``targets``, in place.

    Layers of the vision tower, some of which have the same names, get adapters only with
    ``vision``. Raises ConfigError when no layer can be adapted.
    """
    from peft import LoraConfig, inject_adapter_in_model

    groups = model_groups(checkpoint_names.values())
    vision_weights = {*groups.get("vision", ()), *groups.get("merger", ())}
    head = model.get_output_embeddings()

    def is_candidate(name: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear) or module is head:
            return False
        return vision or checkpoint_names[f"{name}.weight"] not in vision_weights

    layers = [name for name, module in model.named_modules() if is_candidate(name, module)]
    # Where a model has other names, all layers get adapters, as with peft's ``all-linear``.
    targets = [name for name in layers if name.rpartition(".")[2] in settings.targets] or layers
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
    """Give the adapters of the model the scale 0 inside the block.

    peft's own switch also changes ``requires_grad``.
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
    """Return a parameter's name before ``add_adapters``."""
    return name.replace(".base_layer.", ".")


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of a weight's two adapter matrices, by the weight's base name.

    They are down [rank, in] and up [out, rank].
    """
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.{ADAPTER}.weight", f"{layer}.lora_B.{ADAPTER}.weight"


def is_up(name: str) -> bool:
    """Whether a parameter is the second matrix of an adapter, which is 0 at first."""
    return ".lora_B." in name


def saved_name(name: str, checkpoint_names: Mapping[str, str]) -> str:
    """Return the name of an adapter's matrix in peft's files, by the layer's in the checkpoint."""
    layer, _, _ = name.partition(".lora_")
    checkpoint_layer = checkpoint_names[f"{layer}.weight"].removesuffix(".weight")
    matrix = "lora_B" if is_up(name) else "lora_A"
    return f"base_model.model.{checkpoint_layer}.{matrix}.weight"


def merged(weight: Tensor, down: Tensor, up: Tensor, settings: LoraSettings) -> Tensor:
    """Return ``weight + alpha / rank * up @ down``, a new tensor (Hu et al. 2021, "LoRA")."""
    return weight + torch.mm(up, down) * (settings.alpha / settings.rank)


def gather_merged(
    parameters: Mapping[str, nn.Parameter],
    name: str,
    settings: LoraSettings | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return a whole parameter in ``dtype``, with its adapter merged in float32 if it has one.

    It may share memory with the parameter. Collective.
    """
    weight = parameters[name].detach()
    down, up = map(parameters.get, adapter_names(base_name(name)))
    if settings is None or down is None or up is None:
        # Each value is rounded once in either order, and this one sends half of the bytes.
        return gather(weight.to(dtype))
    full = merged(gather(weight), gather(down.detach()), gather(up.detach()), settings)
    return full.to(dtype)
