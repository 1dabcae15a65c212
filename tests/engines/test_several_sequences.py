"""A trajectory of several sequences (an agent that began again, an episode that forgot its images)
counts as one: in the weights of its tokens, in what looks at whole trajectories, and in the numbers
of a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rayloop.core.protocols import TrainItem
from rayloop.core.types import EndReason, Sampling, Trajectory, TrajectoryId, Turn
from rayloop.engines.settings import FsdpSettings
from rayloop.grpo.losses.policy import Denominator, PolicyLoss, entropy_bound, token_weights
from rayloop.grpo.losses.settings import (
    Correction,
    LossChoice,
    LossSettings,
    PpoLoss,
    ReinforceLoss,
)
from tests.engines.training import VERSION, Sgd, engine, run_ranks

NEXT_TO_NOTHING = Sgd(lr=1e-9)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean", 50.0)
ALONE = FsdpSettings(micro_batch_tokens=1)


def played(number: int, parts: Sequence[int], logprob: float = -6.0) -> Trajectory:
    """``parts``: numbers of sampled tokens, each a sequence of its own."""
    turns = list[Turn]()
    for i, n in enumerate(parts):
        ids = tuple(100 + (7 * number + 13 * i + j) % 150 for j in range(n))
        turns.append(Turn("context" if i else "prompt", (64 + number, 65 + i), restart=bool(i)))
        turns.append(Turn("assistant", ids, logprobs=(logprob,) * n, version=VERSION))
    return Trajectory(TrajectoryId(number, 0), 0, "t", 0, tuple(turns), Sampling(), EndReason.DONE)


def at(trajectory: Trajectory, rollout_logprobs: np.ndarray) -> Trajectory:
    """The trajectory as sampled with these log-probs."""
    rest, turns = list(map(float, rollout_logprobs)), list[Turn]()
    for turn in trajectory.turns:
        n = len(turn.token_ids) if turn.sampled else 0
        turns.append(dataclasses.replace(turn, logprobs=tuple(rest[:n])) if turn.sampled else turn)
        rest = rest[n:]
    return dataclasses.replace(trajectory, turns=tuple(turns))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_trajectory_weighs_the_same_in_any_number_of_sequences(
    tiny_vlm: Path, aggregation: Any
) -> None:
    """The loss is linear in the advantages: with one of them at 1 it is that trajectory's weight."""
    settings, shares = ReinforceLoss(aggregation=aggregation, correction="none"), []
    one, many = played(0, [12]), played(1, [3, 3, 3, 3])
    for advantages in ((1.0, 0.0), (0.0, 1.0)):
        with engine(tiny_vlm, optimizer=NEXT_TO_NOTHING, loss=settings) as trainer:
            items = [
                TrainItem(t, a, group_tokens=24)
                for t, a in zip((one, many), advantages, strict=True)
            ]
            report = trainer.train([items])
            logprobs = trainer.logprobs([one, many])[advantages.index(1.0)]
        shares.append(report["actor/loss"] / -float(logprobs.mean()))
        assert report["actor/sequences"] == 2
    assert shares[0] == pytest.approx(shares[1], rel=1e-5)


WHOLE: dict[str, dict[str, Any]] = {
    "gspo": {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.3, "correction": "bypass"},
    "sequence, mask": {
        "correction": {"level": "sequence", "action": "mask", "low": 0.1, "high": 10}
    },
    "sequence, truncate": {"correction": {"level": "sequence", "high": 1.2}},
    "geometric, mask": {
        "correction": {"level": "geometric", "action": "mask", "low": 0.9, "high": 1.1}
    },
    "veto": {"correction": {"veto": [0.5, 2.0]}, "aggregation": "seq-mean-token-mean"},
    "off_policy": {"correction": {"off_policy": 0.05}},
    "own": {"use": "tests.engines.test_several_sequences:over_trajectories"},
}


def over_trajectories(inputs: Any) -> torch.Tensor:
    """A loss of one's own that looks at whole trajectories."""
    loss: torch.Tensor = (
        -inputs.advantage
        * inputs.logprobs
        * inputs.mean((inputs.rollout_logprobs - inputs.old_logprobs).abs())
    )
    return loss


def expected(
    settings: LossSettings, items: Sequence[TrainItem], current: Sequence[np.ndarray]
) -> float:
    """The loss of whole trajectories in one call, from their log-probs."""
    lengths = torch.tensor([len(c) for c in current])
    trajectory_ids = torch.repeat_interleave(torch.arange(len(items)), lengths)
    rollout_logprobs = [
        p for item in items for turn in item.trajectory.sampled_turns for p in turn.logprobs or ()
    ]
    logprobs = torch.from_numpy(np.concatenate(current))
    advantage = torch.tensor([item.advantage for item in items])[trajectory_ids]
    out = PolicyLoss(settings)(
        logprobs, logprobs, torch.tensor(rollout_logprobs), advantage, trajectory_ids
    )
    weights = token_weights(trajectory_ids, settings, Denominator(len(trajectory_ids), len(items)))
    return float((weights * out.loss).sum())


@pytest.mark.parametrize("layout", [FsdpSettings(), ALONE], ids=["together", "alone"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_sees_the_trajectory_and_not_the_sequence(
    tiny_vlm: Path, name: str, layout: FsdpSettings
) -> None:
    """One token of the second sequence is far off; the first sequence knows, also in another
    micro-batch.
    """
    settings: LossSettings = TypeAdapter(LossChoice).validate_python(WHOLE[name])  # type: ignore[arg-type]
    trajectories = [played(0, [5]), played(1, [4, 6]), played(2, [3, 2, 4])]
    with engine(tiny_vlm, layout, NEXT_TO_NOTHING, settings) as trainer:
        current = trainer.logprobs(trajectories)
        rollout_logprobs = [own + 0.02 * np.arange(len(own), dtype=np.float32) for own in current]
        rollout_logprobs[1][7] -= 3.0
        rollout_logprobs[2][1] += 0.9
        sampled = [
            at(trajectory, own)
            for trajectory, own in zip(trajectories, rollout_logprobs, strict=True)
        ]
        items = [TrainItem(t, a) for t, a in zip(sampled, (1.0, 0.7, -1.2), strict=True)]
        report = trainer.train([items])
    assert report["actor/loss"] == pytest.approx(
        expected(settings, items, current), rel=2e-4, abs=1e-6
    )


def test_a_veto_in_one_sequence_leaves_the_others_out(tiny_vlm: Path) -> None:
    with engine(
        tiny_vlm,
        loss=ReinforceLoss(correction=Correction(veto=(1e-4, 100.0))),
        optimizer=NEXT_TO_NOTHING,
    ) as trainer:
        (own,) = trainer.logprobs([played(1, [6, 6])])
        own[6] -= 12.0
        report = trainer.train([[TrainItem(at(played(1, [6, 6]), own), 1.0)]])
    assert (report["actor/capped"], report["actor/loss"], report["actor/grad_norm"]) == (
        1.0,
        0.0,
        0.0,
    )


def test_the_others_tokens_are_those_of_the_weights_of_each_update(tiny_vlm: Path) -> None:
    """Two updates: at the second the ratio of GSPO is that of the whole trajectory again."""
    settings: LossSettings = TypeAdapter(LossChoice).validate_python(
        {**WHOLE["gspo"], "correction": "none"}
    )  # type: ignore[arg-type]
    reports = []
    for layout in (FsdpSettings(), ALONE):
        with engine(tiny_vlm, layout, Sgd(lr=0.05), settings) as trainer:
            items = [
                TrainItem(played(n, parts), a)
                for n, parts, a in ((0, [5], 1.0), (1, [4, 6], -0.7), (2, [3, 2, 4], 0.5))
            ]
            reports.append(trainer.train([items, items]))
    assert reports[0]["actor/ratio_max"] > 1.001
    for name in ("actor/loss", "actor/grad_norm", "actor/clip_low", "actor/clip_high"):
        assert reports[0][name] == pytest.approx(reports[1][name], rel=1e-4, abs=1e-6), name


def test_a_trajectory_counts_once_in_what_adapts(tiny_vlm: Path) -> None:
    """Two epochs and three sequences: n of arXiv:1909.08593, equation 4, is 2; the coefficient is
    logged as it acted.
    """
    settings = PpoLoss.model_validate(
        {"kl_coef": {"start": 0.1, "target": 0.001, "horizon": 100.0}}
    )
    items = [
        TrainItem(t, 1.0, np.full(12, -2.0, np.float32))
        for t in (played(0, [12]), played(1, [4, 4, 4]))
    ]
    with engine(tiny_vlm, optimizer=NEXT_TO_NOTHING, loss=settings) as trainer:
        reports = [trainer.train([items, items]) for _ in range(2)]
    assert [report["actor/sequences"] for report in reports] == [2, 2]
    assert [report["actor/kl_coef"] for report in reports] == pytest.approx(
        [0.1, 0.1 * (1 + 0.2 * 2 / 100)]
    )


# The tokens with the most entropy -----------------------------------------------------------------


def test_the_entropy_from_which_tokens_count_is_the_batchs() -> None:
    """Of a certain and an open answer of ten tokens each, only tokens of the open one count."""
    certain, opened = torch.full((10,), 0.01), torch.linspace(1, 2, 10)
    bound = entropy_bound(torch.cat([certain, opened]), 0.2)
    assert [int((answer >= bound).sum()) for answer in (certain, opened)] == [0, 4]
    assert entropy_bound(torch.zeros(0), 0.2) == math.inf
    assert 1.0 < entropy_bound(torch.tensor([1.0, 2.0]), 1e-6) <= 2.0


@pytest.mark.parametrize("rounding", [-1e-5, 0.0, 1e-5])
def test_rounding_does_not_choose_among_tokens_of_equal_entropy(rounding: float) -> None:
    """The first tokens of a group's members have one entropy, computed in different micro-batches."""
    entropies = torch.tensor([1.7, 1.2, 1.2 + rounding, 0.4])
    assert (entropies >= entropy_bound(entropies, 0.5)).tolist() == [True, True, True, False]


TOP = PpoLoss(top_entropy_quantile=0.3, correction="none")


def chosen_norms(rank: int, world_size: int, folder: Path) -> list[float]:
    """Gradient norms of two updates, over ranks with unequal shares."""
    meeting = Path(folder) / f"meeting-{world_size}"
    items = [
        TrainItem(played(n, parts), a)
        for n, parts, a in ((0, [5], 1.0), (1, [4, 6], -0.7), (2, [9], 0.5), (3, [2], -1.0))
    ]
    share = items if world_size == 1 else (items[:3], items[3:])[rank]
    with engine(
        folder, ALONE, Sgd(lr=0.01), TOP, rank=rank, world_size=world_size, meeting=meeting
    ) as trainer:
        return [trainer.train([share])["actor/grad_norm"] for _ in range(2)]


def test_which_tokens_have_most_entropy_does_not_depend_on_ranks_and_micro_batches(
    tiny_vlm: Path, tmp_path: Path
) -> None:
    [alone] = run_ranks(chosen_norms, 1, tiny_vlm)
    together = run_ranks(chosen_norms, 2, tiny_vlm)
    assert together[0] == pytest.approx(alone, rel=1e-4)
    with engine(tiny_vlm, ALONE, Sgd(lr=0.01), PpoLoss(correction="none")) as trainer:
        every = trainer.train(
            [[TrainItem(played(0, [5]), 1.0), TrainItem(played(1, [4, 6]), -0.7)]]
        )["actor/grad_norm"]
    assert alone[0] != pytest.approx(every, rel=1e-2)
