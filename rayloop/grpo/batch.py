"""The trainer's input: a ``TrainSample`` is one trajectory ready to pack, a ``Batch`` is one packed
micro-batch. A sampled token at position t is predicted by the hidden state at t - 1 of the same
trajectory.
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

from rayloop.core.kept import Kept
from rayloop.core.protocols import TrainItem
from rayloop.core.types import (
    STREAMS,
    FlatTrajectory,
    Sampling,
    Streams,
    TokenIds,
    Trajectory,
    TrajectoryId,
)
from rayloop.grpo.losses.surrogates import Elsewhere


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A trajectory, or one of its sequences, as tensors.

    T tokens, N sampled tokens, R position rows (1 for text models, 4 with M-RoPE).
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [R, T] int64; row 0 counts 0..T-1
    predict: Tensor  # [N] int64, index of the hidden state that predicts each sampled token
    turn_position: Tensor  # [N] int64, index of the sampled token within its turn
    behaviour: Tensor  # [N] float32, log-probs of the engine that sampled
    reference: Tensor | None  # [N] float32
    sampling: Sampling
    # [N] float32, the trainer's log-probs at the start of the step; None: the current ones
    old: Tensor | None = None
    pixels: tuple[
        Future[Tensor], ...
    ] = ()  # per image [patches, D] float32, made in another thread
    grids: tuple[tuple[int, int, int], ...] = ()  # per image (t, h, w) in patches
    prompt_images: int = 0  # how many of the images precede the first sampled token
    advantage: Tensor | float = 0.0  # [N] float32, or one for all
    streams: Streams = STREAMS
    group_tokens: int = 0  # sampled tokens of its group in the update; 0: its own
    part_of: int = (
        0  # number of its trajectory in the update, of which it may be one of several sequences
    )
    trajectory_tokens: int = 0  # sampled tokens of that trajectory; 0: its own
    chosen: Tensor | None = (
        None  # [N] float32, 1 for the tokens of top_entropy_quantile, else 0; None: all
    )
    elsewhere: Elsewhere | None = (
        None  # the tokens of its trajectory's other sequences, where the loss looks at them
    )
    on_policy: bool = False  # treat the behaviour policy as the old one (no correction weight)
    lag: int = 0  # steps between the oldest weights that sampled a turn and those being trained
    kept: Kept | None = None  # [N], the tokens that top_p and top_k kept; None: all

    @property
    def targets(self) -> Tensor:
        """[N] int64: the sampled tokens."""
        return self.token_ids[self.predict + 1]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one; all, if none was sampled."""
        return int(self.predict[0]) + 1 if self.predict.numel() else self.length

    @property
    def advantages(self) -> Tensor:
        """[N] float32."""
        return torch.as_tensor(self.advantage, dtype=torch.float32).expand(len(self.predict))

    @property
    def teaches(self) -> bool:
        """Whether a policy gradient or a supervised one can follow from it."""
        rewarded = (
            bool(self.advantage.any())
            if isinstance(self.advantage, Tensor)
            else self.advantage != 0
        )
        return (rewarded and len(self.predict) > 0 and self.streams.rl != 0) or self.streams.ce != 0

    @property
    def share(self) -> float:
        """Which part of its trajectory's sampled tokens it has, 0 to 1."""
        n = len(self.predict)
        return n / (self.trajectory_tokens or n) if n else 0.0

    @property
    def length(self) -> int:
        """All tokens."""
        return int(self.token_ids.numel())


ON_HOST = ("image_grid", "image_index", "image_places", "starts", "predict")
"""Tensors of a ``Batch`` whose values decide what is computed: reading them from a GPU would wait
for all that it has to do.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: S trajectories packed into one row of T tokens without padding.

    P patches of n distinct images. A trajectory may lack its prompt, if that of the last whole one
    before it is the same.
    """

    token_ids: Tensor  # [1, T] int64
    # [R, 1, T] int64; row 0 restarts with each trajectory, at 0 or after the shared prompt
    position_ids: Tensor
    pixel_values: Tensor | None  # [P, D] float32
    image_grid: Tensor | None  # [n, 3] int64
    image_index: (
        Tensor | None
    )  # [m] int64, m >= n: which distinct image the k-th image of the row is
    image_places: Tensor | None  # [i] int64, index into T: its image tokens, ascending
    starts: Tensor  # [1, T] int64: row 0 of position_ids
    predict: Tensor  # [N] int64, index into T
    targets: Tensor  # [N] int64
    segment: Tensor  # [N] int64, which of the S trajectories; ascending
    behaviour: Tensor  # [N] float32
    advantage: Tensor  # [N] float32
    # [N] float32, weights of the losses of docs/algorithm.md, section 6; so are ref_kl and ce
    rl: Tensor
    ref_kl: Tensor
    ce: Tensor
    group_tokens: Tensor  # [N] int64
    trajectory_tokens: Tensor  # [N] int64
    chosen: Tensor | None  # [N] float32; None: all
    elsewhere: Elsewhere | None
    reference: Tensor | None  # [N] float32
    old: Tensor | None  # [N] float32
    on_policy: Tensor  # [N] bool
    lag: Tensor  # [N] int64
    temperature: Tensor  # [N] float32, never 0
    ban_end: Tensor  # [N] bool, True where ``end_tokens`` could not be sampled (min_tokens)
    banned_tokens: Tensor  # [b] int64
    end_tokens: Tensor  # [e] int64; none where no token has ``ban_end``
    kept: (
        Tensor | None
        # [N, k] int32, the tokens that could be sampled (with repetitions, -1: all); None: all
        # everywhere
    )

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on ``device``, for which nothing waits.

        What the host reads stays on the CPU (``ON_HOST``).
        """
        moved: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            tensor = getattr(self, field.name)
            stays = tensor is None or field.name in ON_HOST
            moved[field.name] = tensor if stays else tensor.to(device, non_blocking=True)
        return Batch(**moved)


def make_sample(
    item: TrainItem,
    flat: FlatTrajectory,
    position_ids: Tensor,
    pixels: Sequence[Future[Tensor]] = (),
) -> TrainSample:
    """A trajectory, flattened, as tensors.

    ``position_ids`` [R, T]; ``pixels`` one [patches, D] per image. Raises ValueError when it cannot
    have been sampled as recorded: its first token is a sampled one, a banned token was sampled or
    one that top_p and top_k removed, or there is not one reference log-prob per sampled token.
    """
    trajectory = item.trajectory
    # They are checked here, where the trajectory has a
    # name: the scorer would give such a token -3e38 nats.
    _check_sampled(trajectory, flat)
    _check_kept(trajectory, flat)

    at = torch.from_numpy(flat.loss_mask.nonzero()[0])
    reference = (
        None if item.reference is None else torch.tensor(item.reference, dtype=torch.float32)
    )
    if reference is not None and reference.shape != at.shape:
        raise ValueError(
            f"trajectory {trajectory.id}: {tuple(reference.shape)} reference log-probs for"
            f" {len(at)} sampled tokens"
        )
    if len(pixels) != len(trajectory.images):
        raise ValueError(
            f"trajectory {trajectory.id}: pixels of {len(pixels)} images for"
            f" {len(trajectory.images)} images"
        )

    # A sampled turn without tokens predicts nothing, so the prompt goes on after it.
    prompt = itertools.takewhile(
        lambda turn: not (turn.sampled and turn.token_ids), trajectory.turns
    )
    return TrainSample(
        token_ids=torch.from_numpy(flat.token_ids),
        position_ids=position_ids,
        predict=at - 1,
        turn_position=torch.from_numpy(flat.turn_position[flat.loss_mask]).long(),
        behaviour=torch.from_numpy(flat.behaviour_logprobs[flat.loss_mask]),
        reference=reference,
        sampling=trajectory.sampling,
        pixels=tuple(pixels),
        grids=tuple(image.grid for image in trajectory.images),
        prompt_images=sum(len(turn.images) for turn in prompt),
        advantage=_of_turns(item) if item.turns else item.advantage,
        streams=item.streams,
        group_tokens=item.group_tokens,
        part_of=item.part_of,
        trajectory_tokens=item.trajectory_tokens,
        on_policy=item.on_policy,
        lag=item.lag,
        kept=None if trajectory.sampling.most_kept is None else flat.kept,
    )


def _of_turns(item: TrainItem) -> Tensor:
    """[N] float32: each sampled token has its turn's advantage."""
    lengths = [len(turn.token_ids) for turn in item.trajectory.sampled_turns]
    if len(lengths) != len(item.turns):
        raise ValueError(
            f"trajectory {item.trajectory.id}: {len(item.turns)} advantages for {len(lengths)}"
            " sampled turns"
        )
    return torch.tensor(item.turns, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))


def _check_sampled(trajectory: Trajectory, flat: FlatTrajectory) -> None:
    if flat.loss_mask[:1].any():
        raise ValueError(
            f"trajectory {trajectory.id}: its first token is a sampled one, no context predicts it"
        )
    sampling = trajectory.sampling
    tokens, positions = flat.token_ids[flat.loss_mask], flat.turn_position[flat.loss_mask]
    too_early = (positions < sampling.min_tokens) & _among(tokens, sampling.end_tokens)
    wrong = np.flatnonzero(_among(tokens, sampling.banned_tokens) | too_early)
    if len(wrong):
        raise ValueError(
            f"trajectory {trajectory.id}: sampled token {tokens[wrong[0]]} at position"
            f" {positions[wrong[0]]} of its turn is one that its Sampling bans (banned_tokens, or"
            " end_tokens before min_tokens)"
        )


def _check_kept(trajectory: Trajectory, flat: FlatTrajectory) -> None:
    sampling, tokens = trajectory.sampling, flat.token_ids[flat.loss_mask]
    if sampling.most_kept is None or not len(tokens):
        return
    limits = (
        f"trajectory {trajectory.id}: top_p is {sampling.top_p} and top_k {sampling.top_k}, and"
    )
    rows = np.zeros((0, 0), np.int32) if flat.kept is None else flat.kept.padded()
    if len(rows) != len(tokens):
        raise ValueError(
            f"{limits} its engine returned {len(rows)} sets of kept tokens for {len(tokens)}"
            " sampled tokens"
        )
    wrong = np.flatnonzero(~(rows == tokens[:, None]).any(1))
    if len(wrong):
        at = int(flat.turn_position[flat.loss_mask][wrong[0]])
        raise ValueError(
            f"{limits} sampled token {tokens[wrong[0]]} at position {at} of its turn is none of the"
            " kept tokens"
        )


def _among(tokens: npt.NDArray[np.int64], ids: TokenIds) -> npt.NDArray[np.bool_]:
    """Which of the ``tokens`` [N] are one of ``ids``."""
    table = _table(ids)
    return table[np.minimum(tokens, len(table) - 1)]


@lru_cache(maxsize=64)
def _table(ids: TokenIds) -> npt.NDArray[np.bool_]:
    """By token id, whether it is one of ``ids``; the last element, which is not, stands for all
    higher ones.
    """
    table: npt.NDArray[np.bool_] = np.zeros(max(ids, default=-1) + 2, np.bool_)
    table[list(ids)] = True
    return table


def segmented(mini_batches: Sequence[Sequence[TrainItem]]) -> list[list[TrainItem]]:
    """Returns an item per segment, with the trajectory's advantage and the segment's part of the
    reference log-probs. A trajectory of several mini-batches has the same segments, as objects, in
    all of them. Raises ValueError when there is not one reference log-prob per sampled token, or
    not one advantage per sampled turn.
    """
    # ``segments`` makes new objects at each call; epochs share these, so that each is scored once.
    known = {
        id(item.trajectory): item.trajectory.segments for items in mini_batches for item in items
    }
    return [
        [
            part
            for number, item in enumerate(items)
            for part in _parts(item, number, known[id(item.trajectory)])
        ]
        for items in mini_batches
    ]


def by_segment(
    trajectories: Sequence[Trajectory],
    score: Callable[[list[Trajectory]], Sequence[npt.NDArray[np.float32]]],
) -> list[npt.NDArray[np.float32]]:
    """Calls ``score`` with all segments at once, and returns one array [sampled_tokens] per
    trajectory.
    """
    segments = [trajectory.segments for trajectory in trajectories]
    # All segments go in one call: scoring is collective, and packs short ones together.
    scored = iter(score([segment for parts in segments for segment in parts]))
    return [np.concatenate([next(scored) for _ in parts]) for parts in segments]


TurnGaps = tuple[tuple[float, float] | None, ...]
"""Of each sampled turn, mean and largest |difference| of the engine's and the trainer's log-probs;
None where none was computed.
"""


def turn_gaps(
    mini_batches: Sequence[Sequence[TrainItem]],
    samples: Sequence[Sequence[TrainSample]],
    differences: Mapping[int, Tensor],
) -> dict[TrajectoryId, TurnGaps]:
    """By trajectory, from the |differences| [N] on the CPU by the ``id`` of each sample.

    ``mini_batches`` as ``segmented``.
    """
    found, known = dict[TrajectoryId, TurnGaps](), set[int]()
    for item, sample in zip(itertools.chain(*mini_batches), itertools.chain(*samples), strict=True):
        if id(item.trajectory) not in known:  # once in several epochs
            known.add(id(item.trajectory))
            lengths, gaps = (
                [len(turn.token_ids) for turn in item.trajectory.sampled_turns],
                differences.get(id(sample)),
            )
            parts = [None] * len(lengths) if gaps is None else gaps.split(lengths)
            turns = (
                None if part is None or not len(part) else (float(part.mean()), float(part.max()))
                for part in parts
            )
            found[item.trajectory.id] = (*found.get(item.trajectory.id, ()), *turns)
    return found


def _parts(item: TrainItem, number: int, segments: Sequence[Trajectory]) -> list[TrainItem]:
    if len(segments) == 1:
        return [dataclasses.replace(item, trajectory=segments[0], part_of=number)]
    lengths = [[len(turn.token_ids) for turn in segment.sampled_turns] for segment in segments]
    ends = np.cumsum([sum(turns) for turns in lengths])
    references: Sequence[Any] = [None] * len(segments)
    if item.reference is not None:
        if len(item.reference) != ends[-1]:
            what = f"{len(item.reference)} reference log-probs for {ends[-1]} sampled tokens"
            raise ValueError(f"trajectory {item.trajectory.id}: {what}")
        references = np.split(np.asarray(item.reference), ends[:-1])
    if item.turns and len(item.turns) != sum(map(len, lengths)):
        what = f"{len(item.turns)} advantages for {sum(map(len, lengths))} sampled turns"
        raise ValueError(f"trajectory {item.trajectory.id}: {what}")
    # Advantages of turns are in the order of all turns, so each segment takes its own in turn.
    turns = iter(item.turns)
    credits = [tuple(itertools.islice(turns, len(own))) for own in lengths]
    return [
        dataclasses.replace(
            item,
            trajectory=segment,
            reference=reference,
            turns=credit,
            part_of=number,
            trajectory_tokens=int(ends[-1]),
        )
        for segment, reference, credit in zip(segments, references, credits, strict=True)
    ]
