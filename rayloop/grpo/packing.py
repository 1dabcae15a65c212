"""Cuts a rank's trajectories into micro-batches, and packs each into one row. Deterministic."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from rayloop.core.kept import Kept
from rayloop.core.types import Sampling
from rayloop.grpo.batch import Batch, TrainSample
from rayloop.grpo.losses.surrogates import Elsewhere


def micro_batches(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Indices into ``lengths`` (tokens), grouped so that each group has at most ``budget`` tokens.

    First-fit decreasing; a sample longer than the budget gets a group of its own. Every index
    occurs once.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    # Ties go by index: a resume must repeat the micro-batches bit for bit.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((i for i, left in enumerate(room) if lengths[index] <= left), None)
        if fits is None:
            groups.append([index])
            room.append(budget - lengths[index])
        else:
            groups[fits].append(index)
            room[fits] -= lengths[index]
    return tuple(tuple(sorted(group)) for group in groups)


def prompt_groups(samples: Sequence[TrainSample], budget: int) -> list[list[TrainSample]]:
    """The samples by common prompt; each group has at most ``budget`` tokens when its prompt counts
    once, or is alone.
    """
    groups: list[list[TrainSample]] = []
    latest: dict[Hashable, list[TrainSample]] = {}
    for sample in samples:
        group = latest.get(_prompt(sample))
        if group is None or packed_length([*group, sample]) > budget:
            group = latest[_prompt(sample)] = []
            groups.append(group)
        group.append(sample)
    return groups


def _prompt(sample: TrainSample) -> Hashable:
    """Equal for samples whose tokens and images before the first sampled token are the same."""
    # Image tokens are the same for all images, so the
    # images count as well, by their shared futures.
    images = tuple(id(pixels) for pixels in sample.pixels[: sample.prompt_images])
    return sample.token_ids[: sample.prompt_length].numpy().tobytes(), images


def packed_length(group: Sequence[TrainSample]) -> int:
    """Tokens of samples with one common prompt, which counts once."""
    # A group has one prompt, so that of its first sample stands for all.
    return group[0].prompt_length + sum(sample.length - sample.prompt_length for sample in group)


def pack(
    samples: Sequence[TrainSample],
    *,
    share_images: bool = False,
    share_prompts: bool = False,
    image_token: int | None = None,
) -> Batch:
    """One row of all samples, in order; attention stays within a sample because row 0 of the
    position ids restarts at each. ``share_images``: an image of several samples (the same Future)
    is in the batch once. ``share_prompts``: a sample lacks its prompt if the sample before it has
    the same one, and starts at the position after it. Raises ValueError when the samples do not
    agree on what may be sampled, and the errors of their images.
    """
    if not samples:
        raise ValueError("nothing to pack: a micro-batch needs at least one sample")
    if share_prompts:
        samples = _without_repeated_prompts(samples)
    counts = [s.predict.numel() for s in samples]
    predicting = [s for s in samples if s.predict.numel()]
    sampling = _common_sampling(predicting)

    def per_token(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(counts))

    ban_end = torch.cat([s.turn_position for s in samples]) < per_token(
        [s.sampling.min_tokens for s in samples], torch.int64
    )
    end_tokens = sampling.end_tokens if ban_end.any() else ()
    images = [pair for s in samples for pair in zip(s.pixels, s.grids, strict=True)]
    keys = [id(pixels) if share_images else i for i, (pixels, _) in enumerate(images)]
    distinct = dict(zip(keys, images, strict=True))
    order = {key: i for i, key in enumerate(distinct)}
    token_ids = torch.cat([s.token_ids for s in samples])
    position_ids = torch.cat([s.position_ids for s in samples], dim=1)
    return Batch(
        token_ids=token_ids[None],
        position_ids=position_ids[:, None],
        starts=position_ids[:1],
        pixel_values=(
            torch.cat([pixels.result() for pixels, _ in distinct.values()]) if images else None
        ),
        image_grid=torch.tensor([grid for _, grid in distinct.values()]) if images else None,
        image_index=torch.tensor([order[key] for key in keys]) if images else None,
        image_places=(
            (token_ids == image_token).nonzero()[:, 0]
            if images and image_token is not None
            else None
        ),
        predict=torch.cat(_predict(samples)),
        targets=torch.cat([s.targets for s in samples]),
        segment=per_token(range(len(samples)), torch.int64),
        behaviour=torch.cat([s.behaviour for s in samples]),
        advantage=(
            torch.cat([s.advantages for s in samples])
            if any(isinstance(s.advantage, Tensor) for s in samples)
            else per_token([s.advantage for s in samples], torch.float32)
        ),
        rl=per_token([s.streams.rl for s in samples], torch.float32),
        ref_kl=per_token([s.streams.ref_kl for s in samples], torch.float32),
        ce=per_token([s.streams.ce for s in samples], torch.float32),
        group_tokens=per_token(
            [s.group_tokens or n for s, n in zip(samples, counts, strict=True)], torch.int64
        ),
        trajectory_tokens=per_token(
            [s.trajectory_tokens or n for s, n in zip(samples, counts, strict=True)], torch.int64
        ),
        chosen=_all_or_none([s.chosen for s in predicting], "chosen tokens"),
        elsewhere=_elsewhere(samples),
        reference=_all_or_none([s.reference for s in predicting], "reference log-probs"),
        old=_all_or_none([s.old for s in predicting], "old log-probs"),
        on_policy=per_token([s.on_policy for s in samples], torch.bool),
        lag=per_token([s.lag for s in samples], torch.int64),
        # Greedy samples have temperature 0: their log-probs are those at 1.
        temperature=per_token([s.sampling.temperature or 1.0 for s in samples], torch.float32),
        ban_end=ban_end,
        banned_tokens=torch.tensor(sampling.banned_tokens, dtype=torch.int64),
        end_tokens=torch.tensor(end_tokens, dtype=torch.int64),
        kept=_kept(predicting),
    )


def _without_repeated_prompts(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples; those with the prompt of the one before them lack it, and predict from -1, its
    last token, on.
    """
    prompts = [None, *(_prompt(sample) for sample in samples)]
    return [
        (
            dataclasses.replace(
                sample,
                token_ids=sample.token_ids[sample.prompt_length :],
                position_ids=sample.position_ids[:, sample.prompt_length :],
                predict=sample.predict - sample.prompt_length,
                pixels=sample.pixels[sample.prompt_images :],
                grids=sample.grids[sample.prompt_images :],
            )
            if before == prompt
            else sample
        )
        for sample, (before, prompt) in zip(samples, itertools.pairwise(prompts), strict=True)
    ]


def _predict(samples: Sequence[TrainSample]) -> list[Tensor]:
    """Where in the row of all ``samples`` the hidden states are that predict the tokens of each."""
    places, start, prompt_end = [], 0, 0
    for sample in samples:
        # A sample without its prompt begins behind the others,
        # but its first token follows the prompt's last one.
        prompt_end = start + sample.prompt_length - 1 if sample.prompt_length else prompt_end
        places.append(torch.where(sample.predict < 0, prompt_end, start + sample.predict))
        start += sample.length
    return places


def _all_or_none(values: Sequence[Tensor | None], name: str) -> Tensor | None:
    """[N] of all samples, or None when no sample has them. Raises ValueError when only some do."""
    present = [value for value in values if value is not None]
    if len(present) == len(values):
        # torch.cat refuses an empty list, which a batch of the dummy alone gives.
        return torch.cat([torch.zeros(0), *present])
    if present:
        raise ValueError(
            f"{len(values) - len(present)} of {len(values)} packed samples lack {name}"
        )
    return None


def _elsewhere(samples: Sequence[TrainSample]) -> Elsewhere | None:
    """The tokens that trajectories of these samples have elsewhere, under the samples' numbers."""
    return Elsewhere.joined(
        [
            dataclasses.replace(s.elsewhere, segment=torch.full_like(s.elsewhere.segment, number))
            for number, s in enumerate(samples)
            if s.elsewhere is not None and len(s.predict)
        ]
    )


def _kept(samples: Sequence[TrainSample]) -> Tensor | None:
    """[N, k] of all samples, or None when no sample has them."""
    if all(sample.kept is None for sample in samples):
        return None
    return torch.from_numpy(
        Kept.joined(s.kept or Kept.everything(len(s.predict)) for s in samples).padded()
    )


def _common_sampling(samples: Sequence[TrainSample]) -> Sampling:
    # The scorer masks the whole batch with one table of tokens.
    masks = {(s.sampling.banned_tokens, s.sampling.end_tokens) for s in samples}
    if len(masks) > 1:
        raise ValueError(
            f"packed samples have {len(masks)} different pairs of banned_tokens and end_tokens; one"
            " run has one"
        )
    return samples[0].sampling if samples else Sampling()
