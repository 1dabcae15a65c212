"""Scores turns once more with pictures of another task (docs/algorithm.md, section 11)."""

import dataclasses
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory, TrajectoryId, derive
from rayloop.engines.training.beforehand import ScoreFunction
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.sharding import on_all_ranks, total
from rayloop.grpo.batch import TrainSample
from rayloop.grpo.sight import TurnChanges

CHECK_STRIDE_STEPS = 5
"""Steps of which one scores turns: a forward pass has a cost for however few they are."""


@dataclass(frozen=True)
class Probe:
    """A turn to score with other pictures.

    ``sequence`` ends with it; ``turn`` is its index among the sampled turns of its trajectory;
    ``images``: the pictures of the sequence that came after the turn before.
    """

    sequence: Trajectory
    turn: int
    images: slice

    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return _length(self.sequence)


class Picture(NamedTuple):
    """A picture of a step: its pixels, its grid, and the group that saw it."""

    pixels: Future[Tensor]
    grid: tuple[int, int, int]
    group: int


class PicturePair(NamedTuple):
    """The sequence of a probe as it was, and with other pictures in its turn."""

    probe: Probe
    own: TrainSample
    other: TrainSample


def _length(sequence: Trajectory) -> int:
    return sum(len(turn.token_ids) for turn in sequence.turns)


def turns_with_pictures(segment: Trajectory, turns_before: int) -> list[Probe]:
    """The sampled turns of a segment that follow new pictures.

    ``turns_before``: sampled turns of the trajectory's earlier segments.
    """
    probes: list[Probe] = []
    images = 0
    images_before = 0
    sampled_turns = turns_before
    for end, turn in enumerate(segment.turns, 1):
        images += len(turn.images)
        if not turn.sampled:
            continue
        if images > images_before and turn.token_ids:
            sequence = dataclasses.replace(segment, turns=segment.turns[:end])
            probes.append(Probe(sequence, sampled_turns, slice(images_before, images)))
        images_before = images
        sampled_turns += 1
    return probes


def drawn(probes: Sequence[Probe], tokens: float, seed: int) -> list[Probe]:
    """Some of the ``probes``, at random, with so many ``tokens`` together in the mean.

    They are of as many groups and turns as possible. The order follows from the turns alone, so
    that it is the same after a resume.
    """
    of_screens = defaultdict[tuple[int, int], list[Probe]](list)
    for probe in probes:
        of_screens[probe.sequence.id.group, probe.turn].append(probe)
    places: list[tuple[int, int, Probe]] = []
    for screen, members in of_screens.items():
        members.sort(key=lambda probe: derive(seed, "member", *screen, probe.sequence.id.sample))
        screen_number = derive(seed, "sight", *screen)
        for place, probe in enumerate(members):
            places.append((place, screen_number, probe))

    chosen: list[Probe] = []
    for place, screen_number, probe in sorted(places, key=lambda entry: entry[:2]):
        if probe.tokens > tokens:
            # The last one is chosen with the probability that makes the mean right.
            chance = random.Random(derive(screen_number, place))
            if chance.random() < tokens / probe.tokens:
                chosen.append(probe)
            break
        chosen.append(probe)
        tokens -= probe.tokens
    return chosen


class SightCheck:
    """Measures on one rank how much the log-probs of turns depend on their pictures."""

    def __init__(
        self, collator: Collator, score: ScoreFunction, seed: int, device: torch.device
    ) -> None:
        self._collator = collator
        self._score = score
        self._seed = seed
        self._device = device

    def changes(
        self,
        mini_batches: Sequence[Sequence[TrainItem]],
        samples: Sequence[Sequence[TrainSample]],
        share: float,
        step: int,
    ) -> dict[TrajectoryId, TurnChanges]:
        """The changes of some turns under the current weights, by trajectory.

        ``mini_batches`` as ``segmented`` returns them, with their ``samples``; ``share``: tokens to
        score, as a share of those of all steps. It is empty but in every ``CHECK_STRIDE_STEPS``-th
        ``step``. Collective.
        """
        if not share or step % CHECK_STRIDE_STEPS:
            return {}
        # With several epochs a segment comes again, as the same object.
        items = {id(item.trajectory): item for item in itertools.chain(*mini_batches)}
        turn_counts = Counter[TrajectoryId]()
        candidates: list[Probe] = []
        tokens = 0
        for item in items.values():
            segment = item.trajectory
            candidates += turns_with_pictures(segment, turn_counts[segment.id])
            turn_counts[segment.id] += len(segment.sampled_turns)
            tokens += _length(segment)
        # Each is scored twice.
        probes = drawn(candidates, share * CHECK_STRIDE_STEPS * tokens / 2, self._seed)
        # Scoring gathers weights on all ranks, so they decide together whether any has a turn.
        (most,) = total([len(probes)], self._device, dist.ReduceOp.MAX)
        if not most:
            return {}

        pictures = _pictures(itertools.chain(*mini_batches), itertools.chain(*samples))
        pairs = on_all_ranks(lambda: self._pairs(probes, pictures))
        to_score = itertools.chain(*((pair.own, pair.other) for pair in pairs))
        scores = iter(self._score(list(to_score)))
        changes: dict[TrajectoryId, list[float | None]] = {}
        for pair in pairs:
            own_logprobs = next(scores).logprobs
            other_logprobs = next(scores).logprobs
            probe = pair.probe
            tokens = len(probe.sequence.turns[-1].token_ids)
            change = (own_logprobs - other_logprobs)[-tokens:].mean()
            trajectory_id = probe.sequence.id
            turns = changes.setdefault(trajectory_id, [None] * turn_counts[trajectory_id])
            turns[probe.turn] = float(change)
        return {trajectory_id: tuple(turns) for trajectory_id, turns in changes.items()}

    def _pairs(self, probes: Sequence[Probe], pictures: Sequence[Picture]) -> list[PicturePair]:
        """A pair for each probe; none for those of a share that shows one task only."""
        items = [TrainItem(probe.sequence, 0.0) for probe in probes]
        samples = [self._collator.sample(item) for item in items]
        # The probes' own pictures are encoded anyhow, and are the first choice for the others.
        chosen_pictures = _pictures(items, samples)
        pairs: list[PicturePair] = []
        for probe, sample in zip(probes, samples, strict=True):
            group = probe.sequence.id.group
            others: list[Future[Tensor]] = []
            for place in range(probe.images.start, probe.images.stop):
                own = Picture(sample.pixels[place], sample.grids[place], group)
                chance = random.Random(derive(self._seed, "other picture", group, place))
                others += _other(own, (chosen_pictures, pictures), chance)
            # A share with one task shows no picture of another.
            if others:
                pixels = list(sample.pixels)
                pixels[probe.images] = others
                other = dataclasses.replace(sample, pixels=tuple(pixels))
                pairs.append(PicturePair(probe, sample, other))
        return pairs


def _pictures(items: Iterable[TrainItem], samples: Iterable[TrainSample]) -> list[Picture]:
    """The pictures of a share, each once for each group that saw it."""
    pictures: dict[tuple[int, int], Picture] = {}
    for item, sample in zip(items, samples, strict=True):
        group = item.trajectory.id.group
        for pixels, grid in zip(sample.pixels, sample.grids, strict=True):
            # An equal picture is the same future.
            pictures[group, id(pixels)] = Picture(pixels, grid, group)
    return list(pictures.values())


def _other(
    own: Picture, choices: Sequence[Sequence[Picture]], chance: random.Random
) -> list[Future[Tensor]]:
    """The pixels of a picture of another group, in as many patches as ``own``; empty without one.

    It is of the first of the ``choices`` that have one of the same grid, else of the last. It may
    be an equal picture: where all screens are the same, there is nothing to see.
    """
    others: list[Picture] = []
    for pictures in choices:
        others = [picture for picture in pictures if picture.group != own.group]
        alike = [picture for picture in others if picture.grid == own.grid]
        if alike:
            return [chance.choice(alike).pixels]
    if not others:
        return []
    patches = chance.choice(others).pixels.result()
    places = torch.arange(len(own.pixels.result())) % len(patches)
    fitted = Future[Tensor]()
    fitted.set_result(patches[places])
    return [fitted]
