"""Cuts a rank's trajectories into micro-batches, and packs each into one row. Deterministic."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayloop.core.token_mask import TokenMask
from rayloop.core.types import Sampling
from rayloop.grpo.batch import Batch, TrainSample
from rayloop.grpo.losses.surrogates import TokensElsewhere

LEAST_SHARED_TOKENS = 64
"""Tokens from which a beginning is shared that is not all of a prompt.

A shorter one would cost more in attention than it saves.
"""


def micro_batches(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Indices into ``lengths`` (tokens), grouped so that each group has at most ``budget`` tokens.

    First-fit decreasing; a sample longer than the budget gets a separate group. Every index occurs
    once.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    # Ties go by index: a resume must repeat the micro-batches bit for bit.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        first_fit = next((i for i, tokens in enumerate(room) if length <= tokens), None)
        if first_fit is None:
            groups.append([index])
            room.append(budget - length)
        else:
            groups[first_fit].append(index)
            room[first_fit] -= length
    return tuple(tuple(sorted(group)) for group in groups)


class Packed(NamedTuple):
    """Samples with a common beginning, ordered so that neighbours share most, and their tokens.

    A beginning that a sample has in common with the one before it counts once.
    """

    samples: list[TrainSample]
    tokens: int


def prefix_groups(
    samples: Sequence[TrainSample], budget: int, image_token: int | None = None
) -> list[Packed]:
    """The samples by common beginnings: the prompt of a group, the segments of a trajectory.

    Each group has at most ``budget`` tokens, or one sample.
    """
    contents = _contents(samples, image_token)
    # Sorted by their tokens, a sample shares its longest beginning with the one just before it.
    order = sorted(range(len(samples)), key=lambda i: (contents[i].tobytes(), i))
    groups: list[Packed] = []
    firsts: list[int] = []
    previous: int | None = None
    for index in order:
        sample = samples[index]
        shared = 0
        if previous is not None:
            shared = _shared(contents[previous], contents[index], sample.prompt_length)
        tokens = sample.length - shared
        if shared and groups[-1].tokens + tokens <= budget:
            group = groups[-1]
            groups[-1] = Packed([*group.samples, sample], group.tokens + tokens)
            firsts[-1] = min(firsts[-1], index)
        else:
            groups.append(Packed([sample], sample.length))
            firsts.append(index)
        previous = index
    return [groups[i] for i in sorted(range(len(groups)), key=firsts.__getitem__)]


def _contents(
    samples: Sequence[TrainSample], image_token: int | None
) -> list[npt.NDArray[np.int32]]:
    """[T] for each sample: its tokens, in place of an image's tokens a number for the image."""
    # Image tokens are the same for all images. Numbers by first use, unlike addresses, give the
    # same order after a resume. A shared image is the same future.
    numbers: dict[int, int] = {}
    contents: list[npt.NDArray[np.int32]] = []
    for sample in samples:
        # The most significant byte first, so that the order of the bytes is that of the numbers.
        tokens = sample.token_ids.numpy().astype(">i4")
        images = [numbers.setdefault(id(pixels), len(numbers)) for pixels in sample.pixels]
        if images:
            numbered = np.array([-1 - number for number in images], np.int32)
            tokens[tokens == image_token] = numbered.repeat(sample.image_tokens)
        contents.append(tokens)
    return contents


def _shared(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32], prompt_length: int) -> int:
    """The tokens at the start of ``second`` that it need not compute after ``first``.

    0 unless they are the whole prompt of ``second`` or ``LEAST_SHARED_TOKENS`` tokens.
    """
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    shared = int(differing[0]) if len(differing) else length
    return shared if shared >= min(prompt_length, LEAST_SHARED_TOKENS) else 0


def pack(
    samples: Sequence[TrainSample],
    *,
    share_images: bool = False,
    share_prefixes: bool = False,
    image_token: int | None = None,
) -> Batch:
    """Packs all samples into one row, in order.

    Attention stays within a sample, or within it and the beginning that it shares. Row 0 of the
    position ids restarts at each sample.
    ``share_images``: an image of several samples (the same Future) is in the batch once.
    ``share_prefixes``: a sample is packed without the beginning that it has in common with the
    sample before, and its positions start after that. Raises ValueError when the samples do not
    agree on what may be sampled, and the errors of their images.
    """
    if not samples:
        raise ValueError("nothing to pack: a micro-batch needs at least one sample")
    shared = [0] * len(samples)
    targets = torch.cat([sample.targets for sample in samples])  # [N]
    if share_prefixes:
        shared = _shared_lengths(samples, image_token)
        samples = [
            _without(sample, length, image_token)
            for sample, length in zip(samples, shared, strict=True)
        ]
    # Samples that predict nothing need no log-probs.
    predicting = [sample for sample in samples if sample.predict.numel()]
    counts = torch.tensor([sample.predict.numel() for sample in samples])  # [S], N in total
    token_ids = torch.cat([sample.token_ids for sample in samples])  # [T]
    position_ids = torch.cat([sample.position_ids for sample in samples], dim=1)  # [R, T]
    return Batch(
        token_ids=token_ids[None],
        position_ids=position_ids[:, None],
        starts=position_ids[:1],
        **_sampling_fields(samples, predicting, counts),
        **_image_fields(samples, token_ids, image_token, share_images),
        targets=targets,
        **_prediction_fields(samples, shared, counts),
        **_loss_fields(samples, counts),
        chosen=_all_or_none([s.chosen for s in predicting], "chosen tokens"),
        elsewhere=_elsewhere(samples),
        ref_logprobs=_all_or_none([s.ref_logprobs for s in predicting], "reference log-probs"),
        old_logprobs=_all_or_none([s.old_logprobs for s in predicting], "old log-probs"),
        masked_logprobs=_all_or_none([s.masked_logprobs for s in predicting], "masked log-probs"),
        token_mask=_token_mask(predicting),
    )


def _sampling_fields(
    samples: Sequence[TrainSample], predicting: Sequence[TrainSample], counts: Tensor
) -> dict[str, Any]:
    """The fields that say which tokens could be sampled, and at which temperature."""
    sampling = _common_sampling(predicting)
    turn_position = torch.cat([s.turn_position for s in samples])
    min_tokens = _per_token([s.sampling.min_tokens for s in samples], counts, torch.int64)
    ban_end = turn_position < min_tokens
    end_tokens = sampling.end_tokens if ban_end.any() else ()
    # Greedy samples have temperature 0: their log-probs are those at 1.
    temperatures = [s.sampling.temperature or 1.0 for s in samples]
    return {
        "temperature": _per_token(temperatures, counts, torch.float32),  # [N]
        "ban_end": ban_end,  # [N]
        "banned_tokens": torch.tensor(sampling.banned_tokens, dtype=torch.int64),  # [b]
        "end_tokens": torch.tensor(end_tokens, dtype=torch.int64),  # [e]
    }


def _image_fields(
    samples: Sequence[TrainSample],
    token_ids: Tensor,
    image_token: int | None,
    share_images: bool,
) -> dict[str, Any]:
    """The fields of the row's m images, n of them distinct; None where it has no images."""
    images: list[tuple[Future[Tensor], tuple[int, int, int]]] = []
    for sample in samples:
        images += zip(sample.pixels, sample.grids, strict=True)
    if not images:
        return dict.fromkeys(("pixel_values", "image_grid", "image_index", "image_places"))
    keys = [id(pixels) if share_images else i for i, (pixels, _) in enumerate(images)]
    distinct = dict(zip(keys, images, strict=True))
    numbers = {key: number for number, key in enumerate(distinct)}
    patches = [pixels.result() for pixels, _ in distinct.values()]
    grids = [grid for _, grid in distinct.values()]
    image_places = None
    if image_token is not None:
        image_places = (token_ids == image_token).nonzero()[:, 0]
    return {
        "pixel_values": torch.cat(patches),  # [P, D]
        "image_grid": torch.tensor(grids),  # [n, 3]
        "image_index": torch.tensor([numbers[key] for key in keys]),  # [m]
        "image_places": image_places,  # [i]
    }


def _prediction_fields(
    samples: Sequence[TrainSample], shared: Sequence[int], counts: Tensor
) -> dict[str, Tensor]:
    """Further fields of the sampled tokens, each [N]."""
    return {
        "predict": torch.cat(_predict(samples, shared)),
        "trajectory_ids": _per_token(range(len(samples)), counts, torch.int64),
        "rollout_logprobs": torch.cat([s.rollout_logprobs for s in samples]),
        "on_policy": _per_token([s.on_policy for s in samples], counts, torch.bool),
        "lag": _per_token([s.lag for s in samples], counts, torch.int64),
    }


def _loss_fields(samples: Sequence[TrainSample], counts: Tensor) -> dict[str, Tensor]:
    """The fields that weigh each sampled token in the loss, each [N]."""
    if any(isinstance(s.advantage, Tensor) for s in samples):
        advantage = torch.cat([s.advantages for s in samples])
    else:
        advantage = _per_token([s.advantage for s in samples], counts, torch.float32)
    group_tokens = [s.group_tokens or len(s.predict) for s in samples]
    trajectory_tokens = [s.trajectory_tokens or len(s.predict) for s in samples]
    return {
        "advantage": advantage,
        "rl": _per_token([s.streams.rl for s in samples], counts, torch.float32),
        "ref_kl": _per_token([s.streams.ref_kl for s in samples], counts, torch.float32),
        "ce": _per_token([s.streams.ce for s in samples], counts, torch.float32),
        "group_tokens": _per_token(group_tokens, counts, torch.int64),
        "trajectory_tokens": _per_token(trajectory_tokens, counts, torch.int64),
    }


def _per_token(values: Sequence[Any], counts: Tensor, dtype: torch.dtype) -> Tensor:
    """[N]: the value of each sample, ``counts`` [S] times."""
    return torch.tensor(values, dtype=dtype).repeat_interleave(counts)


def _shared_lengths(samples: Sequence[TrainSample], image_token: int | None) -> list[int]:
    """For each sample, the tokens that it shares with the one before it."""
    contents = _contents(samples, image_token)
    shared = [
        _shared(previous, content, sample.prompt_length)
        for previous, content, sample in zip(contents, contents[1:], samples[1:], strict=False)
    ]
    return [0, *shared]


def _without(sample: TrainSample, shared: int, image_token: int | None) -> TrainSample:
    """The sample without its first ``shared`` tokens and their images.

    Its ``predict`` counts from there: the positions of shared tokens are negative.
    """
    image_tokens = int((sample.token_ids[:shared] == image_token).sum()) if sample.pixels else 0
    images = int(np.searchsorted(np.cumsum(sample.image_tokens), image_tokens, "right"))
    return dataclasses.replace(
        sample,
        token_ids=sample.token_ids[shared:],
        position_ids=sample.position_ids[:, shared:],
        predict=sample.predict - shared,
        pixels=sample.pixels[images:],
        grids=sample.grids[images:],
        image_tokens=sample.image_tokens[images:],
    )


def _predict(samples: Sequence[TrainSample], shared: Sequence[int]) -> list[Tensor]:
    """Per sample, the indices into the row of the hidden states that predict its tokens.

    ``shared``: for each sample, how many of its first tokens the sample before it has computed.
    """
    places: list[Tensor] = []
    start = 0
    path = torch.zeros(0, dtype=torch.int64)
    for sample, length in zip(samples, shared, strict=True):
        path = torch.cat([path[:length], torch.arange(start, start + sample.length)])
        places.append(path[sample.predict + length])
        start += sample.length
    return places


def _all_or_none(values: Sequence[Tensor | None], name: str) -> Tensor | None:
    """[N] of all samples, or None when no sample has them. Raises ValueError when only some do."""
    present = [value for value in values if value is not None]
    if len(present) == len(values):
        # torch.cat refuses an empty list, which a batch of the dummy alone gives.
        return torch.cat([torch.zeros(0), *present])
    if present:
        missing = len(values) - len(present)
        raise ValueError(f"{missing} of {len(values)} packed samples lack {name}")
    return None


def _elsewhere(samples: Sequence[TrainSample]) -> TokensElsewhere | None:
    """The tokens of these trajectories in other micro-batches, under the samples' numbers."""
    parts: list[TokensElsewhere] = []
    for number, sample in enumerate(samples):
        part = sample.elsewhere
        if part is not None and len(sample.predict):
            trajectory_ids = torch.full_like(part.trajectory_ids, number)
            parts.append(dataclasses.replace(part, trajectory_ids=trajectory_ids))
    return TokensElsewhere.joined(parts)


def _token_mask(samples: Sequence[TrainSample]) -> Tensor | None:
    """[N, k] of all samples, or None when no sample has them."""
    if all(sample.token_mask is None for sample in samples):
        return None
    sets = [sample.token_mask or TokenMask.everything(len(sample.predict)) for sample in samples]
    return torch.from_numpy(TokenMask.joined(sets).padded())


def _common_sampling(samples: Sequence[TrainSample]) -> Sampling:
    # The scorer masks the whole batch with one table of tokens.
    masks = {(s.sampling.banned_tokens, s.sampling.end_tokens) for s in samples}
    if len(masks) > 1:
        raise ValueError(
            f"packed samples have {len(masks)} different pairs of banned_tokens and end_tokens; one"
            " run has one"
        )
    return samples[0].sampling if samples else Sampling()
