"""Makes packed batches of trajectories for a model.

Threads decode images ahead of the device, and pack the next batch while the device computes one.
Images and prompt positions that a group shares are made once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from rayloop.core.model_families import family
from rayloop.core.protocols import TrainItem
from rayloop.core.types import FlatTrajectory, ImageRef, Sampling, Trajectory, derive
from rayloop.engines.attention import shares_prefixes
from rayloop.engines.machine import cores
from rayloop.engines.models import Vision, load_vision, positions, tensor_cache
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.grpo.batch import Batch, TrainSample, make_sample
from rayloop.grpo.packing import Packed, micro_batches, pack, prefix_groups

DECODING_THREADS = 8
"""Threads that decode images, at most one per core."""
POSITION_CACHE_BYTES = 16 << 20
"""Size of the cache of positions, in bytes: some hundred prompts."""


class Collator:
    """Makes samples and batches for ``model``. Pixels stay on the CPU until their batch is used."""

    def __init__(
        self, model: Any, settings: ModelSettings, engine: FsdpSettings, device: torch.device
    ) -> None:
        self._model = model
        self._family = family(model.config.model_type)
        self._device = device
        self._vision = load_vision(settings, model.config)
        self._image_token = model.config.image_token_id if self._vision else None
        self._engine = engine
        self._pool = ThreadPoolExecutor(min(DECODING_THREADS, cores()), "pixels")
        # Packing has a separate thread, because it waits for the threads that decode.
        self._packer = ThreadPoolExecutor(1, "packing")
        # The samples own the pixels: their memory goes back when a step's samples end.
        self._promised: WeakValueDictionary[tuple[str, bool, int | None], Future[Tensor]] = (
            WeakValueDictionary()
        )
        self._positions = tensor_cache(POSITION_CACHE_BYTES)
        self._dummy = self._make_dummy()

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._packer, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def sample(
        self, item: TrainItem, *, swap_images: bool = False, mask_seed: int | None = None
    ) -> TrainSample:
        """Return one trajectory as tensors.

        With ``swap_images`` its images are replaced by visibly different ones. With ``mask_seed``
        they are masked (``rayloop.data.images.masked``), an image of a group in one way. Raises
        ValueError (see make_sample). ``batch`` raises for an image that is missing, corrupt or of
        another grid.
        """
        trajectory = item.trajectory
        flat = trajectory.flatten()
        pixels: list[Future[Tensor]] = []
        for image in trajectory.images:
            mask = None
            if mask_seed is not None:
                mask = derive(mask_seed, "mask", trajectory.id.group, image.sha256)
            pixels.append(self._pixels(image, trajectory, swap_images, mask))
        return make_sample(item, flat, self._position_ids(trajectory, flat), pixels)

    def follows_picture(self, sample: TrainSample) -> Tensor:
        """Return whether each sampled token comes after an image token: bool [N]."""
        image_tokens = (sample.token_ids == self._image_token).cumsum(0)
        return image_tokens[sample.predict] > 0

    def plan(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """Return the samples by micro-batch: packed up to ``micro_batch_tokens``.

        A longer sample is alone, and so is each of a family whose rows hold one.
        """
        if not self._family.packs:
            return [[sample] for sample in samples]
        budget = self._engine.micro_batch * self._engine.sequence_parallel
        if shares_prefixes(self._model):
            groups = prefix_groups(samples, budget, self._image_token)
        else:
            groups = [Packed([sample], sample.length) for sample in samples]
        lengths = [group.tokens for group in groups]
        plan: list[list[TrainSample]] = []
        for group_indices in micro_batches(lengths, budget):
            members = [groups[i].samples for i in group_indices]
            plan.append(list(chain.from_iterable(members)))
        return plan

    def batch(self, samples: Sequence[TrainSample]) -> Batch:
        """Pack samples on the device, or nothing at all into a batch that predicts nothing.

        Raises DataFailure for an image that is missing, corrupt or of another grid. Every batch of
        a vision model has an image, if only a dummy: FSDP needs the ranks to run the same modules,
        and gloo aborts the process when they do not.
        """
        return self._packed(samples).to(self._device)

    def ahead(self, plan: Sequence[Sequence[TrainSample]]) -> Iterator[Batch]:
        """Yield the ``batch`` of each part of the plan, in order.

        While the caller computes with one, a thread packs the next. Raises the error of ``batch``
        at the part that causes it.
        """
        # Only one part is packed ahead: each holds the pixels of all its images.
        promises = deque(self._packer.submit(self._packed, part) for part in plan[:1])
        try:
            for following in range(1, len(plan) + 1):
                # The next part is submitted before the caller
                # computes, so that packing and computing overlap.
                if following < len(plan):
                    promises.append(self._packer.submit(self._packed, plan[following]))
                yield promises.popleft().result().to(self._device)
        finally:
            for promise in promises:
                promise.cancel()

    def _packed(self, samples: Sequence[TrainSample]) -> Batch:
        """Return ``batch``, on the CPU."""
        has_images = self._vision is None or any(sample.pixels for sample in samples)
        return pack(
            [*samples] if samples and has_images else [*samples, self._dummy],
            share_images=self._family.pooled,
            share_prefixes=shares_prefixes(self._model),
            image_token=self._image_token,
        )

    def _pixels(
        self, image: ImageRef, trajectory: Trajectory, swap: bool, mask: int | None
    ) -> Future[Tensor]:
        """Return the future of an image's pixels, the same for all live samples with the image.

        A batch then encodes the image once. A failed future is replaced: this trajectory may have
        the bytes.
        """
        if self._vision is None:
            raise ValueError(
                f"trajectory {trajectory.id} has an image, but the model has no vision tower"
            )
        key = (image.sha256, swap, mask)
        promise = self._promised.get(key)
        failed = promise is not None and promise.done() and promise.exception() is not None
        if promise is None or failed:
            data = trajectory.image_bytes.get(image.sha256)
            promise = self._pool.submit(_decoded, self._vision, image, data, swap, mask)
            self._promised[key] = promise
        return promise

    def _position_ids(self, trajectory: Trajectory, flat: FlatTrajectory) -> Tensor:
        """Return [R, T]. Text after all images counts on from the highest position before it."""
        token_ids = flat.token_ids
        grids = np.array([image.grid for image in trajectory.images], np.int64).reshape(-1, 3)
        if self._vision:
            image_tokens = (token_ids == self._model.config.image_token_id).nonzero()[0]
        else:
            image_tokens = np.zeros(0, np.int64)
        start = int(image_tokens.max(initial=-1)) + 1

        def positions_up_to_start() -> Tensor:
            return positions(
                self._model, torch.from_numpy(token_ids[:start]), torch.from_numpy(grids)
            )

        # The same tokens have other positions with images of other grids, so both make the key.
        key = sha256(token_ids[:start].tobytes() + grids.tobytes()).hexdigest()
        first = self._positions.made(key, positions_up_to_start)
        steps = torch.arange(len(token_ids) - start)
        # Row 0 counts tokens; M-RoPE's other rows continue together from their common maximum.
        text_row = _next_position(first[:1]) + steps.expand(1, -1)
        rotary_rows = _next_position(first[1:]) + steps.expand(len(first) - 1, -1)
        rest = torch.cat([text_row, rotary_rows])
        return torch.cat([first, rest], dim=1)

    def _make_dummy(self) -> TrainSample:
        """Return a sample that predicts nothing, with an image for a vision model."""
        length = self._engine.sequence_parallel  # every rank of a row has a token
        token_ids = torch.zeros(length).long()
        grids = torch.zeros(0, 3).long()
        image_tokens: tuple[int, ...] = ()
        pixels = Future[Tensor]()
        if self._vision is not None:
            image, grid, count = self._vision.dummy()
            image_ids = torch.full((count,), self._image_token)
            token_ids = torch.cat([image_ids, token_ids[count:]])
            image_tokens = (count,)
            grids = torch.tensor([grid])
            pixels.set_result(image)
        empty = torch.zeros(0)
        return TrainSample(
            token_ids=token_ids,
            position_ids=positions(self._model, token_ids, grids),
            predict=empty.long(),
            turn_position=empty.long(),
            rollout_logprobs=empty,
            ref_logprobs=None,
            sampling=Sampling(),
            pixels=(pixels,) if len(grids) else (),
            grids=tuple((t, h, w) for t, h, w in grids.tolist()),
            image_tokens=image_tokens,
        )


def _next_position(rows: Tensor) -> int:
    """Return the position after all positions of ``rows`` [n, T]."""
    return int(rows.max()) + 1 if rows.numel() else 0


def _decoded(
    vision: Vision, image: ImageRef, data: bytes | None, swap: bool, mask: int | None
) -> Tensor:
    pixels = vision.pixels(image, data, mask)
    # A swapped image is upside down and inverted: the latter also changes a uniform grey.
    return 1 - pixels.flip(0) if swap else pixels
