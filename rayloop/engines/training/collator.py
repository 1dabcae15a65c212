"""From trajectories to packed batches for one model: positions, pixels, and the dummy image of text-only batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayloop.core.protocols import TrainItem
from rayloop.core.types import ImageRef, Sampling, Trajectory
from rayloop.engines.attention import shares_prompts
from rayloop.engines.models import POOLED_MODELS, load_vision, positions
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.grpo.batch import Batch, Sample, make_sample
from rayloop.grpo.packing import micro_batches, pack, packed_length, prompt_groups


class Collator:
    """Makes samples and batches for ``model``. Pixels stay on the CPU until their batch is used."""

    def __init__(self, model: Any, settings: ModelSettings, engine: FsdpSettings, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._vision = load_vision(settings, model.config)
        self._engine = engine
        self._dummy = self._make_dummy()

    def sample(self, item: TrainItem, *, swap_images: bool = False) -> Sample:
        """One trajectory as tensors; with ``swap_images`` its images are replaced by visibly different ones.

        Raises DataFailure for an image that is missing, corrupt or of another grid, and ValueError (see make_sample).
        """
        trajectory = item.trajectory
        grids = torch.tensor([image.grid for image in trajectory.images]).reshape(-1, 3)
        token_ids = torch.from_numpy(trajectory.flatten().token_ids)
        pixels = [self._pixels(image, trajectory) for image in trajectory.images]
        if swap_images:
            pixels = [1 - image.flip(0) for image in pixels]  # upside down and inverted, also for a uniform grey
        return make_sample(item, positions(self._model, token_ids, grids), pixels)

    def plan(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples' micro-batches: packed up to ``micro_batch_tokens``; a longer one is alone."""
        budget = self._engine.micro_batch_tokens
        groups = prompt_groups(samples, budget) if shares_prompts(self._model) else [[sample] for sample in samples]
        plan = micro_batches([packed_length(group) for group in groups], budget)
        return [[sample for i in indices for sample in groups[i]] for indices in plan]

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """Pack samples on the device, or nothing at all into a batch that predicts nothing.

        Every batch of a vision model has an image, if only a dummy behind the text: FSDP needs the ranks to run the
        same modules, and gloo aborts the process when they do not.
        """
        complete = samples and (self._vision is None or any(sample.pixels for sample in samples))
        return pack(
            [*samples] if complete else [*samples, self._dummy],
            share_images=self._model.config.model_type in POOLED_MODELS,
            share_prompts=shares_prompts(self._model),
        ).to(self._device)

    def _pixels(self, image: ImageRef, trajectory: Trajectory) -> Tensor:
        if self._vision is None:
            raise ValueError(f"trajectory {trajectory.id} has an image, but the model has no vision tower")
        return self._vision.pixels(image, trajectory.image_bytes.get(image.sha256))

    def _make_dummy(self) -> Sample:
        config = self._model.config
        nothing = torch.zeros(0)
        text = Sample(
            token_ids=torch.zeros(1, dtype=torch.int64),
            position_ids=torch.zeros(1, 1, dtype=torch.int64),
            predict=nothing.long(),
            turn_position=nothing.long(),
            behaviour=nothing,
            reference=None,
            sampling=Sampling(),
        )
        if self._vision is None:
            return text
        vision = config.vision_config
        side = vision.spatial_merge_size
        return dataclasses.replace(
            text,
            token_ids=torch.tensor([config.image_token_id]),
            position_ids=torch.zeros(4, 1, dtype=torch.int64),
            pixels=(torch.zeros(side**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2),),
            grids=((1, side, side),),
        )
