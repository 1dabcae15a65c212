"""Noise on one part of the model, with which the weight sync's self-test finds stale weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayloop.core.types import derive
from rayloop.engines.models import model_groups
from rayloop.engines.settings import LoraSettings
from rayloop.engines.training.lora import base_name, is_adapter, is_up
from rayloop.engines.training.sharding import add_noise
from rayloop.engines.training_settings import ADAPTERS

NOISE_SCALE = 0.5
"""Noise relative to each tensor's root mean square: far above rounding."""


def perturb(
    group: str,
    parameters: Mapping[str, nn.Parameter],
    checkpoint_names: Mapping[str, str],
    lora: LoraSettings | None,
    *,
    shard_seed: tuple[int, int],
    device: torch.device,
    perturbed: bool,
) -> dict[str, Tensor]:
    """Add noise to the parameters of ``group``; return their shards as they were, by name.

    ``shard_seed``: the run's seed and the number of this rank's shard. Raises ValueError for an
    unknown group, and when the model is ``perturbed`` already. Collective.
    """
    groups = model_groups(checkpoint_names.values())
    if lora:
        groups = {**groups, ADAPTERS: [name for name in parameters if is_adapter(name)]}
    if group not in groups or perturbed:
        raise ValueError(
            f"cannot perturb {group!r}: choose one of {list(groups)}, and restore_parameters in"
            " between"
        )
    members = set(groups[group])
    seed, shard = shard_seed
    originals: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        group_name = name if is_adapter(name) else checkpoint_names[base_name(name)]
        if group_name not in members:
            continue
        generator = torch.Generator().manual_seed(derive(seed, "perturb", name, shard))
        # The second matrix of a new adapter is 0, and noise relative to it would be 0 as well.
        least = lora.rank**0.5 / lora.alpha if lora and is_up(name) else 0.0
        originals[name] = add_noise(parameter, NOISE_SCALE, generator, device, least)
    return originals
