"""The trainer's input: a ``TrainSample`` is one trajectory, a ``Batch`` one packed micro-batch.

The hidden state at position t - 1 of a trajectory predicts its sampled token at position t.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayloop.core.protocols import TrainItem
from rayloop.core.token_mask import TokenMask
from rayloop.core.types import (
    STREAMS,
    FlatTrajectory,
    Sampling,
    Streams,
    TokenIds,
    Trajectory,
    TrajectoryId,
)
from rayloop.grpo.losses.surrogates import TokensElsewhere


@dataclass(frozen=True)
class TrainSample:
    """A trajectory, or one of its segments, as tensors.

    T tokens, N sampled tokens, R position rows (1 for text models, 4 with M-RoPE).
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [R, T] int64; row 0 counts 0..T-1
    predict: Tensor  # [N] int64, index of the hidden state that predicts each sampled token
    turn_position: Tensor  # [N] int64, index of the sampled token within its turn
    rollout_logprobs: Tensor  # [N] float32, log-probs of the engine that sampled
    ref_logprobs: Tensor | None  # [N] float32
    sampling: Sampling
    # [N] float32, the trainer's log-probs at the start of the step; None: the current ones
    old_logprobs: Tensor | None = None
    # [N] float32, log-probs with masked pictures, NaN before the first picture; None: not needed
    masked_logprobs: Tensor | None = None
    # Per image [patches, D] float32; another thread computes them.
    pixels: tuple[Future[Tensor], ...] = ()
    grids: tuple[tuple[int, int, int], ...] = ()  # per image (t, h, w) in patches
    image_tokens: tuple[int, ...] = ()  # per image, the tokens that it has among token_ids
    advantage: Tensor | float = 0.0  # [N] float32, or one for all
    streams: Streams = STREAMS
    group_tokens: int = 0  # sampled tokens of its group in the update; 0: of the sample
    # Number of the trajectory in the update; a trajectory may have several segments.
    part_of: int = 0
    trajectory_tokens: int = 0  # sampled tokens of that trajectory; 0: of the sample
    # [N] float32, 1 for the tokens of top_entropy_quantile, else 0; None: all
    chosen: Tensor | None = None
    # The tokens of the trajectory's other segments, where the loss needs them.
    elsewhere: TokensElsewhere | None = None
    on_policy: bool = (
        False  # treat the policy that sampled it as the old one (no correction weight)
    )
    lag: int = 0  # steps between the oldest weights that sampled a turn and the trained ones
    token_mask: TokenMask | None = None  # [N], the tokens that top_p and top_k kept; None: all

    @property
    def targets(self) -> Tensor:
        """[N] int64: the sampled tokens."""
        return self.token_ids[self.predict + 1]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one; all if none was sampled."""
        return int(self.predict[0]) + 1 if self.predict.numel() else self.length

    @property
    def advantages(self) -> Tensor:
        """[N] float32."""
        return torch.as_tensor(self.advantage, dtype=torch.float32).expand(len(self.predict))

    @property
    def teaches(self) -> bool:
        """Whether the sample can have a policy gradient or a supervised one."""
        if isinstance(self.advantage, Tensor):
            has_advantage = bool(self.advantage.any())
        else:
            has_advantage = self.advantage != 0
        has_policy_gradient = has_advantage and len(self.predict) > 0 and self.streams.rl != 0
        return has_policy_gradient or self.streams.ce != 0

    @property
    def share(self) -> float:
        """Fraction of the trajectory's sampled tokens that the sample has, 0 to 1."""
        n = len(self.predict)
        return n / (self.trajectory_tokens or n) if n else 0.0

    @property
    def length(self) -> int:
        """Number of all tokens."""
        return int(self.token_ids.numel())


ON_HOST = ("image_grid", "image_index", "image_places", "starts", "predict")
"""Tensors of a ``Batch`` that stay on the CPU, since their values decide what is computed.

Reading them from a GPU would wait for all work that is queued there.
"""


@dataclass(frozen=True)
class Batch:
    """A micro-batch: S trajectories packed into one row of T tokens without padding.

    P patches of n distinct images. A beginning that neighbours share is in the row once: in the
    first of them.
    """

    token_ids: Tensor  # [1, T] int64
    # [R, 1, T] int64; row 0 restarts with each trajectory, at 0 or after what it shares with the
    # one before
    position_ids: Tensor
    pixel_values: Tensor | None  # [P, D] float32
    image_grid: Tensor | None  # [n, 3] int64
    # [m] int64, m >= n: which distinct image the k-th image of the row is
    image_index: Tensor | None
    image_places: Tensor | None  # [i] int64, index into T: its image tokens, ascending
    starts: Tensor  # [1, T] int64: row 0 of position_ids
    predict: Tensor  # [N] int64, index into T
    targets: Tensor  # [N] int64
    trajectory_ids: Tensor  # [N] int64, which of the S trajectories; ascending
    rollout_logprobs: Tensor  # [N] float32
    advantage: Tensor  # [N] float32
    # [N] float32: rl, ref_kl and ce weigh the losses of docs/algorithm.md, section 6.
    rl: Tensor
    ref_kl: Tensor
    ce: Tensor
    group_tokens: Tensor  # [N] int64
    trajectory_tokens: Tensor  # [N] int64
    chosen: Tensor | None  # [N] float32; None: all
    elsewhere: TokensElsewhere | None
    ref_logprobs: Tensor | None  # [N] float32
    old_logprobs: Tensor | None  # [N] float32
    masked_logprobs: Tensor | None  # [N] float32
    on_policy: Tensor  # [N] bool
    lag: Tensor  # [N] int64
    temperature: Tensor  # [N] float32, never 0
    ban_end: Tensor  # [N] bool, True where ``end_tokens`` could not be sampled (min_tokens)
    banned_tokens: Tensor  # [b] int64
    end_tokens: Tensor  # [e] int64; empty where no token has ``ban_end``
    # [N, k] int32, the tokens that could be sampled (with repetitions, -1: all); None: all at each
    token_mask: Tensor | None

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on ``device``; the copies do not block the host.

        The tensors that the host reads stay on the CPU (``ON_HOST``).
        """
        tensors: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            tensor = getattr(self, field.name)
            stays = tensor is None or field.name in ON_HOST
            tensors[field.name] = tensor if stays else tensor.to(device, non_blocking=True)
        return Batch(**tensors)


def make_sample(
    item: TrainItem,
    flat: FlatTrajectory,
    position_ids: Tensor,
    pixels: Sequence[Future[Tensor]] = (),
) -> TrainSample:
    """Returns a flattened trajectory as tensors.

    ``position_ids`` [R, T]; ``pixels`` one [patches, D] per image. Raises ValueError when it cannot
    have been sampled as recorded: its first token is a sampled one, a banned token was sampled or
    one that top_p and top_k removed, or there is not one reference log-prob per sampled token.
    """
    trajectory = item.trajectory
    # The checks are here, where an error can name the trajectory:
    # the scorer would give such a token -3e38 nats.
    _check_sampled(trajectory, flat)
    _check_token_mask(trajectory, flat)

    mask = flat.loss_mask
    places = torch.from_numpy(mask.nonzero()[0])  # [N] int64
    ref_logprobs = None
    if item.ref_logprobs is not None:
        ref_logprobs = torch.tensor(item.ref_logprobs, dtype=torch.float32)
        if ref_logprobs.shape != places.shape:
            raise ValueError(
                f"trajectory {trajectory.id}: {tuple(ref_logprobs.shape)} reference log-probs for"
                f" {len(places)} sampled tokens"
            )
    if len(pixels) != len(trajectory.images):
        raise ValueError(
            f"trajectory {trajectory.id}: pixels of {len(pixels)} images for"
            f" {len(trajectory.images)} images"
        )

    return TrainSample(
        token_ids=torch.from_numpy(flat.token_ids),
        position_ids=position_ids,
        predict=places - 1,
        turn_position=torch.from_numpy(flat.turn_position[mask]).long(),
        rollout_logprobs=torch.from_numpy(flat.rollout_logprobs[mask]),
        ref_logprobs=ref_logprobs,
        sampling=trajectory.sampling,
        pixels=tuple(pixels),
        grids=tuple(image.grid for image in trajectory.images),
        image_tokens=tuple(image.tokens for image in trajectory.images),
        advantage=_turn_advantages(item) if item.turns else item.advantage,
        streams=item.streams,
        group_tokens=item.group_tokens,
        part_of=item.part_of,
        trajectory_tokens=item.trajectory_tokens,
        on_policy=item.on_policy,
        lag=item.lag,
        token_mask=None if trajectory.sampling.effective_top_k is None else flat.token_mask,
    )


def _turn_advantages(item: TrainItem) -> Tensor:
    """[N] float32: the advantage of each sampled token's turn."""
    lengths = _turn_lengths(item.trajectory)
    if len(lengths) != len(item.turns):
        raise ValueError(
            f"trajectory {item.trajectory.id}: {len(item.turns)} advantages for {len(lengths)}"
            " sampled turns"
        )
    return torch.tensor(item.turns, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))


def _turn_lengths(trajectory: Trajectory) -> list[int]:
    """Number of tokens of each sampled turn."""
    return [len(turn.token_ids) for turn in trajectory.sampled_turns]


def _check_sampled(trajectory: Trajectory, flat: FlatTrajectory) -> None:
    if flat.loss_mask[:1].any():
        raise ValueError(
            f"trajectory {trajectory.id}: its first token is a sampled one, no context predicts it"
        )
    sampling = trajectory.sampling
    tokens = flat.token_ids[flat.loss_mask]
    positions = flat.turn_position[flat.loss_mask]
    ends_too_early = (positions < sampling.min_tokens) & _among(tokens, sampling.end_tokens)
    errors = np.flatnonzero(_among(tokens, sampling.banned_tokens) | ends_too_early)
    if len(errors):
        first = errors[0]
        raise ValueError(
            f"trajectory {trajectory.id}: sampled token {tokens[first]} at position"
            f" {positions[first]} of its turn is one that its Sampling bans (banned_tokens, or"
            " end_tokens before min_tokens)"
        )


def _check_token_mask(trajectory: Trajectory, flat: FlatTrajectory) -> None:
    sampling = trajectory.sampling
    tokens = flat.token_ids[flat.loss_mask]
    if sampling.effective_top_k is None or not len(tokens):
        return
    limits = (
        f"trajectory {trajectory.id}: top_p is {sampling.top_p} and top_k {sampling.top_k}, and"
    )
    mask = flat.token_mask
    rows = np.zeros((0, 0), np.int32) if mask is None else mask.padded()
    if len(rows) != len(tokens):
        raise ValueError(
            f"{limits} its engine returned {len(rows)} sets of kept tokens for {len(tokens)}"
            " sampled tokens"
        )
    errors = np.flatnonzero(~(rows == tokens[:, None]).any(1))
    if len(errors):
        first = errors[0]
        position = int(flat.turn_position[flat.loss_mask][first])
        raise ValueError(
            f"{limits} sampled token {tokens[first]} at position {position} of its turn is not"
            " one of the kept tokens"
        )


def _among(tokens: npt.NDArray[np.int64], ids: TokenIds) -> npt.NDArray[np.bool_]:
    """[N] bool: which of the ``tokens`` [N] are one of ``ids``."""
    table = _membership_table(ids)
    return table[np.minimum(tokens, len(table) - 1)]


@lru_cache(maxsize=64)
def _membership_table(ids: TokenIds) -> npt.NDArray[np.bool_]:
    """By token id, whether it is one of ``ids``.

    The last element is False and stands for all higher ids.
    """
    table: npt.NDArray[np.bool_] = np.zeros(max(ids, default=-1) + 2, np.bool_)
    table[list(ids)] = True
    return table


def segmented(mini_batches: Sequence[Sequence[TrainItem]]) -> list[list[TrainItem]]:
    """Returns an item per segment of each trajectory.

    It has the trajectory's advantage and the segment's part of the reference log-probs. A
    trajectory of several mini-batches has the same segments, as objects, in all of them. Raises
    ValueError when there is not one reference log-prob per sampled token, or not one advantage per
    sampled turn.
    """
    # ``segments`` makes new objects at each call; epochs share these, so that each is scored once.
    segments = {
        id(item.trajectory): item.trajectory.segments for item in itertools.chain(*mini_batches)
    }
    batches: list[list[TrainItem]] = []
    for items in mini_batches:
        batches.append([])
        for number, item in enumerate(items):
            batches[-1] += _segment_items(item, number, segments[id(item.trajectory)])
    return batches


def by_segment(
    trajectories: Sequence[Trajectory],
    score: Callable[[list[Trajectory]], Sequence[npt.NDArray[np.float32]]],
) -> list[npt.NDArray[np.float32]]:
    """Scores all segments with one call of ``score``.

    Returns one array [sampled_tokens] per trajectory.
    """
    segments = [trajectory.segments for trajectory in trajectories]
    # All segments go in one call: scoring is collective, and packs short ones together.
    scores = iter(score(list(itertools.chain(*segments))))
    arrays: list[npt.NDArray[np.float32]] = []
    for parts in segments:
        arrays.append(np.concatenate([next(scores) for _ in parts]))
    return arrays


TurnGaps = tuple[tuple[float, float] | None, ...]
"""Per sampled turn, mean and largest |log-prob difference| of engine and trainer.

None where none was computed.
"""


def turn_gaps(
    mini_batches: Sequence[Sequence[TrainItem]],
    samples: Sequence[Sequence[TrainSample]],
    differences: Mapping[int, Tensor],
) -> dict[TrajectoryId, TurnGaps]:
    """By trajectory, from the |differences| [N] on the CPU by the ``id`` of each sample.

    ``mini_batches`` as ``segmented`` returns them.
    """
    gaps: dict[TrajectoryId, TurnGaps] = {}
    segments: set[int] = set()
    for item, sample in zip(itertools.chain(*mini_batches), itertools.chain(*samples), strict=True):
        # With several epochs a segment comes again; the first one counts.
        if id(item.trajectory) in segments:
            continue
        segments.add(id(item.trajectory))
        lengths = _turn_lengths(item.trajectory)
        difference = differences.get(id(sample))
        if difference is None:
            turns: list[tuple[float, float] | None] = [None] * len(lengths)
        else:
            turns = [_mean_and_max(turn) for turn in difference.split(lengths)]
        gaps[item.trajectory.id] = (*gaps.get(item.trajectory.id, ()), *turns)
    return gaps


def _mean_and_max(values: Tensor) -> tuple[float, float] | None:
    return (float(values.mean()), float(values.max())) if len(values) else None


def _segment_items(item: TrainItem, number: int, segments: Sequence[Trajectory]) -> list[TrainItem]:
    """Returns a copy of ``item`` for each segment; ``number``: the trajectory's in the update."""
    if len(segments) == 1:
        return [dataclasses.replace(item, trajectory=segments[0], part_of=number)]
    lengths = [_turn_lengths(segment) for segment in segments]
    ends = np.cumsum([sum(turns) for turns in lengths])
    ref_logprobs_of: Sequence[Any] = [None] * len(segments)
    if item.ref_logprobs is not None:
        if len(item.ref_logprobs) != ends[-1]:
            raise ValueError(
                f"trajectory {item.trajectory.id}: {len(item.ref_logprobs)} reference log-probs for"
                f" {ends[-1]} sampled tokens"
            )
        ref_logprobs_of = np.split(np.asarray(item.ref_logprobs), ends[:-1])
    turn_count = sum(map(len, lengths))
    if item.turns and len(item.turns) != turn_count:
        raise ValueError(
            f"trajectory {item.trajectory.id}: {len(item.turns)} advantages for {turn_count}"
            " sampled turns"
        )
    # The advantages are in the order of all turns, so each segment takes the next ones.
    turns = iter(item.turns)
    credits = [tuple(itertools.islice(turns, len(segment))) for segment in lengths]
    return [
        dataclasses.replace(
            item,
            trajectory=segment,
            ref_logprobs=ref_logprobs,
            turns=credit,
            part_of=number,
            trajectory_tokens=int(ends[-1]),
        )
        for segment, ref_logprobs, credit in zip(segments, ref_logprobs_of, credits, strict=True)
    ]
