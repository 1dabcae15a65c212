"""The losses of a recorded step, computed again from the log-probs on record."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayloop.actors.assignments import Assignment, assignments
from rayloop.core.failures import ConfigError
from rayloop.core.groups import Group
from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory
from rayloop.engines.updates import (
    Scores,
    completed,
    contributing,
    counts,
    denominators,
    entropies,
    micro_batch_loss,
    to_score,
)
from rayloop.grpo.batch import TrainSample, make_sample, segmented
from rayloop.grpo.losses.policy import Denominator, PolicyLoss, entropy_bound
from rayloop.grpo.losses.settings import LossSettings
from rayloop.grpo.packing import pack
from rayloop.replay.rewards import Place
from rayloop.replay.settings import RecordedConfig
from rayloop.rollout.step_record import RecordedStep

LOSSES = ("rl", "ref_kl", "loss")
"""Results of a token: two streams, and the weighted sum of all."""
TokenValues = Mapping[str, Tensor]
"""Values [N] of the sampled tokens of a segment, by name."""


class SegmentKey(NamedTuple):
    """A segment of a trajectory, within a pass over the step's trajectories."""

    epoch: int
    place: Place
    segment: int


class Sample(NamedTuple):
    """A segment that an update trains."""

    key: SegmentKey
    sample: TrainSample


Shares = Sequence[Sequence[Sequence[Sample]]]
"""The samples of each update, by rank."""


@dataclass
class TokenRecord:
    """What the ranks kept of a step's tokens.

    ``plans``: by update and rank the samples of each micro-batch, as indices into the share.
    ``scores``: of segments that were scored before their update.
    """

    values: dict[SegmentKey, TokenValues] = field(default_factory=dict)
    scores: dict[SegmentKey, Scores] = field(default_factory=dict)
    plans: list[list[list[list[int]]]] = field(default_factory=list)


@dataclass(frozen=True)
class Computed:
    """The results of a step's updates.

    ``tokens``: LOSSES of each segment that was computed; ``batch_losses``: of each micro-batch, by
    update and rank.
    """

    tokens: dict[SegmentKey, TokenValues]
    batch_losses: list[list[list[float]]]


def shares(
    groups: Sequence[Group], config: RecordedConfig, step: RecordedStep
) -> list[list[list[Sample]]]:
    """The samples of each update, by rank, as the driver assigns them and the trainer cuts them."""
    algorithm = config.algorithm
    plan = assignments(
        groups,
        config.policy.ranks,
        config.policy.update,
        config.seed,
        step.version,
        algorithm.target,
        treat_as_on_policy=algorithm.replay.kind == "on_policy",
        together=config.sequence_parallel,
    )
    places: dict[int, Place] = {}
    for group in groups:
        for place, member in enumerate(group.members):
            places[id(member.payload)] = group.number, place
    epochs = config.policy.update.epochs
    updates: list[list[list[Sample]]] = []
    for rank_plan in plan[:: config.sequence_parallel]:
        for number, share in enumerate(_rank_shares(rank_plan, places, epochs)):
            if number == len(updates):
                updates.append([])
            updates[number].append(share)
    return updates


def _rank_shares(
    plan: Sequence[Sequence[Assignment]], places: Mapping[int, Place], epochs: int
) -> list[list[Sample]]:
    """A rank's samples of each update; ``places``: by the ``id`` of the payload."""
    # A trajectory of several epochs must be one object in all of them.
    trained: dict[int, Trajectory] = {}
    items: list[list[TrainItem]] = []
    keys: list[list[tuple[Place, int]]] = []
    for share in plan:
        items.append([])
        keys.append([])
        for assignment in share:
            payload: Any = assignment.payload
            trajectory = trained.setdefault(id(payload), _without_images(payload))
            items[-1].append(_item(assignment, trajectory))
            place = places[id(payload)]
            keys[-1] += [(place, number) for number in range(len(trajectory.segments))]
    per_epoch = max(1, len(items) // epochs)
    shares = []
    for number, (update, update_keys) in enumerate(zip(segmented(items), keys, strict=True)):
        samples = []
        for item, (place, segment) in zip(update, update_keys, strict=True):
            key = SegmentKey(number // per_epoch, place, segment)
            samples.append(Sample(key, _sample(item)))
        shares.append(samples)
    return shares


def _item(assignment: Assignment, trajectory: Trajectory) -> TrainItem:
    """The trainer's input, without the reference's log-probs, which a rank has on record."""
    credit = assignment.credit
    return TrainItem(
        trajectory,
        credit.advantage,
        on_policy=assignment.on_policy,
        lag=assignment.lag,
        turns=credit.turns,
        streams=credit.streams,
        group_tokens=assignment.group_tokens,
    )


def _without_images(trajectory: Trajectory) -> Trajectory:
    """The trajectory for a loss, which needs no pixels."""
    turns = tuple(replace(turn, images=()) for turn in trajectory.turns)
    return replace(trajectory, turns=turns)


def _sample(item: TrainItem) -> TrainSample:
    flat = item.trajectory.flatten()
    # Positions of tokens matter to a model alone.
    positions = torch.arange(len(flat.token_ids))[None]
    return make_sample(item, flat, positions)


def token_record(updates: Shares, step: RecordedStep) -> TokenRecord:
    """What is on record of the samples of a step. Raises ConfigError when it does not fit them."""
    record = TokenRecord()
    try:
        for number, ranks in enumerate(updates):
            record.plans.append([])
            for rank, share in enumerate(ranks):
                _add(record, share, step.ranks[rank]["updates"][number])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the losses of step {step.step} do not fit its trajectories, so its record is damaged"
            f" ({type(error).__name__}: {error})"
        ) from error
    return record


def _add(record: TokenRecord, share: Sequence[Sample], update: Mapping[str, Any]) -> None:
    """Add a rank's ``update`` of the samples of ``share``."""
    plan = [list(map(int, part)) for part in update["plan"]]
    record.plans[-1].append(plan)
    planned = [share[number] for number in chain.from_iterable(plan)]
    lengths = [len(segment.sample.predict) for segment in planned]
    columns: dict[str, Sequence[Tensor]] = {}
    for name, array in update["tokens"].items():
        if name != "batch_loss":
            columns[name] = torch.from_numpy(np.array(array)).split(lengths)
    for number, segment in enumerate(planned):
        record.values[segment.key] = {name: column[number] for name, column in columns.items()}
    for name, array in update["scored"].items():
        logprobs, entropy = torch.from_numpy(np.array(array))
        record.scores[share[int(name)].key] = Scores(logprobs, entropy)


class _Scored(NamedTuple):
    """A segment with the log-probs on record; ``scores``: those that its update computed."""

    key: SegmentKey
    sample: TrainSample
    scores: Scores


def compute(
    updates: Shares,
    loss: LossSettings,
    coefficients: Sequence[float] | None,
    record: TokenRecord,
    *,
    same_plan: bool,
) -> Computed:
    """The losses of all updates; ``coefficients``: the state of those that adapt.

    ``same_plan``: the micro-batches are those on record, so that their sums are equal bit for bit;
    otherwise a rank has one. Raises ConfigError for a term whose log-probs are not on record.
    """
    policy_loss = PolicyLoss(loss)
    if coefficients is not None and loss.adapts:
        policy_loss.coefficients.load(torch.tensor(coefficients, dtype=torch.float64))
    names = set(chain.from_iterable(record.values.values()))
    _check_inputs(loss, names)
    result = Computed({}, [])
    for number, ranks in enumerate(updates):
        shares = [[_scored(segment, record, names) for segment in share] for share in ranks]
        shares = _completed(shares, loss, record)
        sums = [counts([segment.sample for segment in share]) for share in shares]
        update_denominators = denominators([sum(column) for column in zip(*sums, strict=True)])
        result.batch_losses.append([])
        for rank, share in enumerate(shares):
            plan = record.plans[number][rank] if same_plan else [_contributing(share, loss)]
            losses = []
            for part in plan:
                segments = [share[place] for place in part]
                batch_loss, tokens = _micro_batch(segments, policy_loss, loss, update_denominators)
                losses.append(batch_loss)
                result.tokens.update(tokens)
            result.batch_losses[-1].append(losses)
    return result


def _check_inputs(loss: LossSettings, names: set[str]) -> None:
    """Raise ConfigError for a term that needs other log-probs than those on record."""
    if loss.uses_kl and "ref_logprobs" not in names:
        raise ConfigError(
            "policy.loss.kl_coef: the step has no log-probs of a reference on record, since the run"
            " had no KL term"
        )
    if loss.perception is not None and "masked_logprobs" not in names:
        raise ConfigError(
            "policy.loss.perception: the step has no log-probs with masked pictures on record,"
            " since the run had no such term"
        )


def _scored(segment: Sample, record: TokenRecord, names: set[str]) -> _Scored:
    """The segment with the values on record, of which some have ``names``.

    Where the trainer computed none, the engine's log-probs stand for all others.
    """
    values = record.values.get(segment.key)
    if values is None:
        engine = segment.sample.rollout_logprobs
        stand_ins = {name: engine for name in names if name.endswith("logprobs")}
        values = {**stand_ins, "logprobs": engine, "entropy": torch.zeros_like(engine)}
    sample = replace(
        segment.sample,
        old_logprobs=values.get("old_logprobs"),
        ref_logprobs=values.get("ref_logprobs"),
        masked_logprobs=values.get("masked_logprobs"),
    )
    return _Scored(segment.key, sample, Scores(values["logprobs"], values["entropy"]))


def _completed(
    shares: Sequence[Sequence[_Scored]], loss: LossSettings, record: TokenRecord
) -> list[list[_Scored]]:
    """The segments by rank, with the values of other micro-batches that their losses need."""
    scores: dict[int, Scores] = {}
    measured: list[Tensor] = [torch.zeros(0)]
    samples_of_ranks = [[segment.sample for segment in share] for share in shares]
    for share, samples in zip(shares, samples_of_ranks, strict=True):
        needed = {id(sample) for sample in to_score(samples, loss)}
        for segment in share:
            if id(segment.sample) in needed:
                scores[id(segment.sample)] = record.scores.get(segment.key, segment.scores)
        if loss.top_entropy_quantile < 1:
            measured += entropies(samples, scores)
    if not scores:
        return list(map(list, shares))
    bound = None
    if loss.top_entropy_quantile < 1:
        bound = entropy_bound(torch.cat(measured), loss.top_entropy_quantile)
    results = []
    for share, samples in zip(shares, samples_of_ranks, strict=True):
        ready = completed(samples, loss, scores, bound)
        results.append(
            [old._replace(sample=sample) for old, sample in zip(share, ready, strict=True)]
        )
    return results


def _contributing(share: Sequence[_Scored], loss: LossSettings) -> list[int]:
    """The places in a share of the segments that have a loss."""
    computed = contributing([segment.sample for segment in share], loss)
    ids = set(map(id, computed))
    return [place for place, segment in enumerate(share) if id(segment.sample) in ids]


def _micro_batch(
    segments: Sequence[_Scored],
    policy_loss: PolicyLoss,
    settings: LossSettings,
    denominators: Mapping[str, Denominator],
) -> tuple[float, dict[SegmentKey, TokenValues]]:
    """The loss of a micro-batch, and the losses of the tokens of each of its segments."""
    # A rank without samples computes with an empty micro-batch where others have one.
    if not segments:
        return 0.0, {}
    batch = pack([segment.sample for segment in segments])
    logprobs, entropy = (
        torch.cat(column) for column in zip(*(segment.scores for segment in segments), strict=True)
    )
    result = micro_batch_loss(batch, logprobs, entropy, policy_loss, settings, denominators)
    lengths = [len(segment.sample.predict) for segment in segments]
    columns = {name: column.split(lengths) for name, column in result.tokens.items()}
    tokens: dict[SegmentKey, TokenValues] = {}
    for place, segment in enumerate(segments):
        tokens[segment.key] = {name: column[place] for name, column in columns.items()}
    return 0.0 if result.total is None else float(result.total), tokens


@contextmanager
def threads_of(step: RecordedStep) -> Iterator[None]:
    """Compute with the threads of the record: the sum of many tokens depends on their number."""
    before = torch.get_num_threads()
    try:
        if step.ranks:
            torch.set_num_threads(max(1, int(step.ranks[0]["threads"])))
        yield
    finally:
        torch.set_num_threads(before)
