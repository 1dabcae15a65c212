"""How far the log-probs of an engine and a trainer are apart, and where that begins.

Both compute the log-probs of the same sampled tokens. All differences are in nats.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
LIMITS: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.05}
"""Type of the computation -> the mean |difference| that a row may have.

They are those of a run's log-prob check at its start (``weight_sync.logprob_check``).
"""
CLIP_SHARE = 0.2
"""How far a ratio may be from 1 inside of PPO's clip range (``PpoLoss.clip_low``)."""
K3_BOUND_NATS = 10.0
"""The largest log-ratio whose exponential k3 takes, as in ``rayloop.grpo.losses.kl``."""


class Axis(StrEnum):
    """What varies from row to row of a part of the table."""

    TEXT = "text"
    """Several turns without an image."""
    IMAGES = "images"
    """One turn whose prompt has several images."""
    SCREENS = "screens"
    """Several turns with an image in each."""
    DEPTH = "depth"
    """One turn behind a long text, and behind an image where the model reads images."""


class Play(StrEnum):
    """How the same prompt was played."""

    FIRST = "first"
    """Sampled, with a prompt that the engine sees for the first time."""
    REPEAT = "repeat"
    """Sampled again: the same first tokens, with other images."""
    GREEDY = "greedy"
    """With the likeliest token at each position, and log-probs at temperature 1."""


class LogprobSource(StrEnum):
    """Whose log-probs they are."""

    ENGINE = "engine"
    TRAINER = "trainer"
    WRONG_IMAGES = "wrong images"
    """The trainer's, with every image replaced."""
    THEIRS = "theirs"
    """Another trainer's."""


@dataclass(frozen=True)
class SampledTurn:
    """One sampled turn of N tokens, with its ``logprobs`` [N] by source.

    ``name``: of the dialogue that it is in. ``turn`` counts from 1. ``images`` are in front of the
    turn, ``depth`` is the number of tokens there. ``picture`` describes the last image.
    ``other_choices``: tokens that are not the trainer's likeliest.
    """

    axis: Axis
    name: str
    play: Play
    turn: int
    images: int
    depth: int
    logprobs: Mapping[LogprobSource, Floats]
    picture: str = ""
    other_choices: int = 0


@dataclass(frozen=True)
class Gap:
    """The difference of two sources' log-probs over ``tokens``.

    ``mean`` and ``largest`` of |difference|; ``k3``: mean of ``exp(d) - d - 1`` with ``d`` the
    second minus the first (joschu.net/blog/kl-approx.html, 2020); ``outside``: the share of tokens
    whose ratio ``exp(d)`` leaves the clip range.
    """

    mean: float
    largest: float
    k3: float
    outside: float
    tokens: int


def gap(
    turns: Sequence[SampledTurn],
    second: LogprobSource = LogprobSource.TRAINER,
    first: LogprobSource = LogprobSource.ENGINE,
) -> Gap | None:
    """The gap of two sources; None unless all turns have both.

    Raises ValueError for a log-prob that is not a number.
    """
    if not turns or not all(second in turn.logprobs for turn in turns):
        return None
    d = np.concatenate([turn.logprobs[second] - turn.logprobs[first] for turn in turns])
    if not np.isfinite(d).all():
        raise ValueError(f"a log-prob of {first} or {second} is not a number")
    distance = np.abs(d)
    bounded = np.minimum(d.astype(np.float64), K3_BOUND_NATS)
    outside = np.abs(np.exp(bounded) - 1) > CLIP_SHARE
    return Gap(
        mean=float(distance.mean()),
        largest=float(distance.max()),
        k3=float((np.expm1(bounded) - bounded).mean()),
        outside=float(outside.mean()),
        tokens=len(d),
    )


@dataclass(frozen=True)
class Row:
    """All plays of one turn: engine and trainer (``gap``), and by play its mean |difference|.

    ``depth``: the most tokens in front of the turn in any play. ``wrong_images``: mean change of
    the trainer's log-prob with other images; None without images. ``theirs``: the engine
    and another trainer.
    """

    axis: Axis
    turn: int
    images: int
    depth: int
    picture: str
    gap: Gap
    plays: Mapping[Play, float]
    wrong_images: float | None
    theirs: Gap | None
    greedy_tokens: int
    other_choices: int

    def failing(self, limit: float) -> list[Play]:
        """The plays whose mean |difference| is above ``limit``."""
        return [play for play, mean in self.plays.items() if mean > limit]


def rows(turns: Iterable[SampledTurn]) -> list[Row]:
    """A row for each turn of each dialogue, in the order in which they come first."""
    members: dict[tuple[str, int], list[SampledTurn]] = {}
    for turn in turns:
        members.setdefault((turn.name, turn.turn), []).append(turn)
    return [row_of(plays) for plays in members.values()]


def row_of(turns: Sequence[SampledTurn]) -> Row:
    """The row of these turns, of which there is at least one. Raises ValueError (``gap``)."""
    whole = gap(turns)
    assert whole is not None
    plays = {}
    for play in Play:
        part = gap([turn for turn in turns if turn.play is play])
        if part is not None:
            plays[play] = part.mean
    shows_images = [turn for turn in turns if turn.images]
    change = gap(shows_images, LogprobSource.WRONG_IMAGES, LogprobSource.TRAINER)
    greedy = [turn for turn in turns if turn.play is Play.GREEDY]
    first = turns[0]
    return Row(
        axis=first.axis,
        turn=first.turn,
        images=first.images,
        depth=max(turn.depth for turn in turns),
        picture=first.picture,
        gap=whole,
        plays=plays,
        wrong_images=change.mean if change else None,
        theirs=gap(turns, LogprobSource.THEIRS),
        greedy_tokens=sum(len(turn.logprobs[LogprobSource.ENGINE]) for turn in greedy),
        other_choices=sum(turn.other_choices for turn in greedy),
    )


@dataclass(frozen=True)
class Agreement:
    """Whether engine and trainer agree; if not, where the difference begins.

    ``begins``: "turn", "image" or "depth" with its ``number``; "" where they agree. ``plays``: the
    plays that differ there. ``blind``: the rows whose log-probs do not react to other images.
    """

    agrees: bool
    sentence: str
    blind: Sequence[Row]
    begins: str = ""
    number: int = 0
    plays: Sequence[Play] = ()


def agreement(table: Sequence[Row], limit: float) -> Agreement:
    """Judge the rows by their mean |difference|, play by play.

    A difference begins with a turn where rows without images differ, with an image where the
    prompt's number of images decides, with a turn again where only later turns differ, and with a
    depth where all short prompts agree.
    """
    blind = [row for row in table if row.wrong_images is not None and row.wrong_images <= limit]
    failing = [row for row in table if row.failing(limit)]
    if not failing:
        return Agreement(True, "they agree in every row", blind)
    first = failing[0]
    plays = first.failing(limit)
    begins = "turn"
    number = first.turn
    picture = ""
    if first.axis is Axis.DEPTH:
        begins = "depth"
        number = first.depth
    elif first.axis is Axis.IMAGES:
        begins = "image"
        number = _first_image(table, failing)
        picture = next((f" ({row.picture})" for row in table if row.images == number), "")
    causes = _causes(first, number, picture, plays)
    sentence = f"they differ starting at {begins} {number}{picture}; look at {causes}"
    return Agreement(False, sentence, blind, begins, number, plays)


def _first_image(table: Sequence[Row], failing: Sequence[Row]) -> int:
    """The number of the first image with which rows differ.

    Prompts with 2 and 4 images leave open whether the third or the fourth is the first; the turns
    with an image in each have every number.
    """
    first = failing[0]
    smaller = [row.images for row in table if row.axis is Axis.IMAGES and row.images < first.images]
    return min(row.images for row in failing if row.images > max(smaller, default=0))


def _causes(row: Row, number: int, picture: str, plays: Sequence[Play]) -> str:
    """The usual causes of a difference that begins with this row."""
    if plays == [Play.REPEAT]:
        return (
            "the cache of prefixes: only the repeat differs, whose tokens had other images before"
        )
    if Play.GREEDY in row.plays and Play.GREEDY not in plays:
        return "the temperature and the sampling mask: greedy tokens agree"
    match row.axis:
        case Axis.DEPTH:
            return "stretched positions (rope_scaling) and sliding windows: shorter prompts agree"
        case Axis.SCREENS:
            return "positions behind an image, and the order of images over turns"
        case Axis.IMAGES if "resized" in picture:
            return "the resize: what is before it agrees"
        case Axis.IMAGES if number > 1:
            return "the order of images: what is before it agrees"
        case Axis.IMAGES:
            return "positions (M-RoPE) and patches: text agrees"
    if row.turn > 1:
        return "the chat template of earlier turns, and the cache of prefixes: earlier turns agree"
    return (
        "weights, tied heads, adapters, norms, a missing first token, the chat template, log-probs"
        " from before temperature and mask: text differs"
    )
