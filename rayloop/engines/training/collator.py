"""Makes packed batches of trajectories for one model.

Threads decode images ahead of the device, and pack the next batch while the device computes one.
Images and prompt positions that a group shares are made once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from rayloop.core.model_families import family
from rayloop.core.protocols import TrainItem
from rayloop.core.types import FlatTrajectory, ImageRef, Sampling, Trajectory
from rayloop.engines.attention import shares_prompts
from rayloop.engines.machine import cores
from rayloop.engines.models import Vision, load_vision, positions, tensor_cache
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.grpo.batch import Batch, TrainSample, make_sample
from rayloop.grpo.packing import micro_batches, pack, packed_length, prompt_groups

THREADS = 8
"""Threads that decode images, at most one per core."""
POSITIONS = 16 << 20
"""Bytes of cached positions: some hundred prompts."""


class Collator:
    """Makes samples and batches for ``model``. Pixels stay on the CPU until their batch is used."""

    def __init__(
        self, model: Any, settings: ModelSettings, engine: FsdpSettings, device: torch.device
    ) -> None:
        self._model = model
        self._family = family(model.config.model_type)
        self._device = device
        self._vision = load_vision(settings, model.config)
        self._engine = engine
        self._pool = ThreadPoolExecutor(min(THREADS, cores()), "pixels")
        self._packer = ThreadPoolExecutor(
            1, "packing"
        )  # one of its own: it waits for those that decode
        # The samples own the pixels: their memory goes back when a step's samples end.
        self._promised: WeakValueDictionary[tuple[str, bool], Future[Tensor]] = (
            WeakValueDictionary()
        )
        self._positions = tensor_cache(POSITIONS)
        self._dummy = self._make_dummy()

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._packer, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def sample(self, item: TrainItem, *, swap_images: bool = False) -> TrainSample:
        """One trajectory as tensors; with ``swap_images`` its images are replaced by visibly
        different ones. Raises ValueError (see make_sample). ``batch`` raises for an image that is
        missing, corrupt or of another grid.
        """
        trajectory, flat = item.trajectory, item.trajectory.flatten()
        pixels = [self._pixels(image, trajectory, swap_images) for image in trajectory.images]
        return make_sample(item, flat, self._position_ids(trajectory, flat), pixels)

    def plan(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """Returns the samples by micro-batch: packed up to ``micro_batch_tokens``; a longer sample
        is alone, and so is each of a family whose rows hold one.
        """
        if not self._family.packs:
            return [[sample] for sample in samples]
        budget = self._engine.micro_batch * self._engine.sequence_parallel
        groups = (
            prompt_groups(samples, budget)
            if shares_prompts(self._model)
            else [[sample] for sample in samples]
        )
        plan = micro_batches([packed_length(group) for group in groups], budget)
        return [[sample for i in indices for sample in groups[i]] for indices in plan]

    def batch(self, samples: Sequence[TrainSample]) -> Batch:
        """Pack samples on the device, or nothing at all into a batch that predicts nothing.

        Raises DataFailure for an image that is missing, corrupt or of another grid. Every batch of
        a vision model has an image, if only a dummy: FSDP needs the ranks to run the same modules,
        and gloo aborts the process when they do not.
        """
        return self._packed(samples).to(self._device)

    def ahead(self, plan: Sequence[Sequence[TrainSample]]) -> Iterator[Batch]:
        """Yields the ``batch`` of each part of the plan, in order; while the caller computes with
        one, a thread packs the next. Raises what ``batch`` raises, at the part that causes it.
        """
        # Only one part is packed ahead: each holds the pixels of all its images.
        promises = deque(self._packer.submit(self._packed, part) for part in plan[:1])
        try:
            for number in range(1, len(plan) + 1):
                # The next one is handed in before the caller
                # computes, so that packing and computing overlap.
                promises.extend(
                    self._packer.submit(self._packed, part) for part in plan[number : number + 1]
                )
                yield promises.popleft().result().to(self._device)
        finally:
            for promise in promises:
                promise.cancel()

    def _packed(self, samples: Sequence[TrainSample]) -> Batch:
        """``batch``, on the CPU."""
        complete = samples and (self._vision is None or any(sample.pixels for sample in samples))
        return pack(
            [*samples] if complete else [*samples, self._dummy],
            share_images=self._family.pooled,
            share_prompts=shares_prompts(self._model),
            image_token=self._model.config.image_token_id if self._vision else None,
        )

    def _pixels(self, image: ImageRef, trajectory: Trajectory, swap: bool) -> Future[Tensor]:
        """Returns the same future for all live samples with this image, so that a batch encodes it once. A failed one is retried:
        this trajectory may have the bytes.
        """
        if self._vision is None:
            raise ValueError(
                f"trajectory {trajectory.id} has an image, but the model has no vision tower"
            )
        promise = self._promised.get((image.sha256, swap))
        if promise is None or (promise.done() and promise.exception() is not None):
            data = trajectory.image_bytes.get(image.sha256)
            promise = self._promised[image.sha256, swap] = self._pool.submit(
                _decoded, self._vision, image, data, swap
            )
        return promise

    def _position_ids(self, trajectory: Trajectory, flat: FlatTrajectory) -> Tensor:
        """[R, T]. Text that follows all images counts on from the highest position before it."""
        token_ids, grids = (
            flat.token_ids,
            np.array([image.grid for image in trajectory.images], np.int64).reshape(-1, 3),
        )
        images = (
            token_ids == self._model.config.image_token_id
            if self._vision
            else np.zeros(0, np.bool_)
        )
        start = int(images.nonzero()[0].max(initial=-1)) + 1

        # The same tokens have other positions with images of other grids, so both make the key.
        key = sha256(token_ids[:start].tobytes() + grids.tobytes()).hexdigest()
        first = self._positions.made(
            key,
            lambda: positions(
                self._model, torch.from_numpy(token_ids[:start]), torch.from_numpy(grids)
            ),
        )
        ahead = torch.arange(len(token_ids) - start)
        # Row 0 counts tokens; M-RoPE's other rows go on together from their common maximum.
        rest = torch.cat(
            [_after(rows) + ahead.expand(len(rows), -1) for rows in (first[:1], first[1:])]
        )
        return torch.cat([first, rest], dim=1)

    def _make_dummy(self) -> TrainSample:
        least = self._engine.sequence_parallel  # every rank of a row has a token
        nothing, token_ids, grids, pixels = (
            torch.zeros(0),
            torch.zeros(least).long(),
            torch.zeros(0, 3).long(),
            Future[Tensor](),
        )
        if self._vision is not None:
            image, grid, count = self._vision.dummy()
            token_ids = torch.cat(
                [torch.full((count,), self._model.config.image_token_id), token_ids[count:]]
            )
            grids = torch.tensor([grid])
            pixels.set_result(image)
        return TrainSample(
            token_ids=token_ids,
            position_ids=positions(self._model, token_ids, grids),
            predict=nothing.long(),
            turn_position=nothing.long(),
            behaviour=nothing,
            reference=None,
            sampling=Sampling(),
            pixels=(pixels,) if len(grids) else (),
            grids=tuple((t, h, w) for t, h, w in grids.tolist()),
        )


def _after(rows: Tensor) -> int:
    """The position after all those of ``rows`` [n, T]."""
    return int(rows.max()) + 1 if rows.numel() else 0


def _decoded(vision: Vision, image: ImageRef, data: bytes | None, swap: bool) -> Tensor:
    pixels = vision.pixels(image, data)
    return (
        1 - pixels.flip(0) if swap else pixels
    )  # upside down and inverted, also for a uniform grey
