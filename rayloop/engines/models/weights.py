"""Names of a model's weights in its checkpoint, and copies of weights into a model."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rayloop.core.failures import ConfigError, WeightSyncError
from rayloop.core.model_families import family
from rayloop.core.protocols import Manifest
from rayloop.transports.manifest import verify

FUSED = (".experts.gate_up_proj", ".experts.down_proj")
"""Endings of the names of tensors that hold all experts of a layer: [experts, out, in]."""


def checkpoint_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's parameter names mapped to the names in its Hugging Face checkpoint.

    A tied head is listed once, and experts by the name that all of a layer have here. Raises
    ConfigError for a model whose checkpoint is otherwise not a renaming of its parameters.
    """
    parameter_names = [name for name, _ in model.named_parameters()]
    fused = FUSED if family(model.config.model_type).experts else ()
    names = [name for name in parameter_names if not name.endswith(fused)]
    # A number stands for each tensor: where it comes out shows its name in the checkpoint. Two
    # elements show a merge by their shape.
    tags = {name: torch.tensor([i, i]) for i, name in enumerate(names)}
    try:
        converted = revert_weight_conversion(model, tags)
    except (IndexError, RuntimeError, ValueError):  # a conversion of tensors of other shapes
        converted = {}
    by_index = {int(tag[0]): name for name, tag in converted.items() if tag.shape == (2,)}
    if sorted(by_index) != list(range(len(names))):
        raise ConfigError(
            f"{type(model).__name__}: its checkpoint merges or splits parameters, which a weight"
            " sync cannot send"
        )
    renamed = {name: by_index[i] for i, name in enumerate(names)}
    return {name: renamed.get(name, name) for name in parameter_names}


def hf_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters themselves (detached, same storage) under their checkpoint names."""
    names = checkpoint_names(model)
    layout = family(model.config.model_type).experts
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors |= as_saved(layout, names[name], parameter.detach())
    return tensors


def copy_weights(
    manifest: Manifest, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> None:
    """Verify the weights, then copy them into ``parameters`` (see ``hf_state``) in place.

    They are converted to the parameters' dtype. Raises WeightSyncError, also for weights of another
    model; nothing is copied then.
    """
    # All checks come before the first copy: half of
    # the new weights would be worse than the old ones.
    verify(manifest, tensors)

    # A tensor that is left out would keep the old weights without a sign.
    missing = parameters.keys() - tensors.keys()
    unknown = tensors.keys() - parameters.keys()
    shapes = [
        name
        for name in parameters.keys() & tensors.keys()
        if parameters[name].shape != tensors[name].shape
    ]
    if missing or unknown or shapes:
        raise WeightSyncError(
            f"version {manifest.version} is of another model than the engine's: "
            f"missing {sorted(missing)}, unknown {sorted(unknown)}, other shapes {sorted(shapes)}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def model_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the checkpoint names by part of the model, for the weight sync's self-test.

    Parts that do not occur are left out.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_part(name), []).append(name)
    return groups


def _part(name: str) -> str:
    if "visual." in name or "vision_tower." in name or "multi_modal_projector." in name:
        return "merger" if "merger" in name or "projector" in name else "vision"
    if "embed_tokens" in name:
        return "embedding"
    return "head" if name.startswith("lm_head") else "language"


def as_saved(layout: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensor under the names of the checkpoint, as views of it.

    ``layout``: of the family (``ModelFamily.experts``).
    """
    if not layout or not name.endswith(FUSED):
        return {name: tensor}
    if layout == "transposed":
        return {name: tensor.transpose(1, 2)}
    experts, _, kind = name.rpartition(".")
    parts = ["gate", "up"] if kind == "gate_up_proj" else ["down"]
    views: dict[str, Tensor] = {}
    for number, expert in enumerate(tensor):
        for part, view in zip(parts, expert.chunk(len(parts)), strict=True):
            views[f"{experts}.{number}.{part}_proj.weight"] = view
    return views
