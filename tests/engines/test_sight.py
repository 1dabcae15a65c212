"""How much a turn depends on its pictures: which turns are scored, with which pictures, and that
nothing of it changes what is trained.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory, TrajectoryId
from rayloop.engines.training.sight import drawn, turns_with_pictures
from tests.engines.training import VERSION, engine, run_ranks, trajectory

SHAPES = [
    [(3, (2, 2), 4), (2, (3, 1), 5), (6, None, 2), (2, (2, 2), 3)],
    [(4, (2, 2), 7), (2, (3, 1), 3)],
    [(5, None, 3)],
    [(2, (4, 2), 3)],
]


def items(folder: Path) -> list[TrainItem]:
    return [TrainItem(trajectory(folder, n, turns), 1.0) for n, turns in enumerate(SHAPES)]


def of_turns(played: Trajectory, logprobs: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([len(turn.token_ids) for turn in played.sampled_turns])
    return np.split(logprobs, ends[:-1])


def with_picture(played: Trajectory, place: int, other: Trajectory, of: int) -> Trajectory:
    """With the picture of one turn replaced by that of another trajectory's turn."""
    turns = list(played.turns)
    turns[place] = dataclasses.replace(turns[place], images=other.turns[of].images)
    return dataclasses.replace(
        played, turns=tuple(turns), image_bytes={**played.image_bytes, **other.image_bytes}
    )


def test_each_turn_that_shows_a_picture_is_scored_with_another_tasks(tiny_vlm: Path) -> None:
    played = items(tiny_vlm)
    with engine(tiny_vlm) as trainer:
        plain = trainer.logprobs([item.trajectory for item in played])
        first, second = played[0].trajectory, played[1].trajectory
        expected = {}
        # The pictures of these two have the same grids, so each gets the other's.
        for number, (place, of) in {0: (0, 0), 1: (2, 2), 3: (6, 0)}.items():
            (swapped,) = trainer.logprobs([with_picture(first, place, second, of)])
            own = of_turns(first, plain[0])[number] - of_turns(first, swapped)[number]
            expected[number] = own.mean()
        trainer.train([played], sight=1e6)
        found = trainer.sight
    assert [len(found[item.trajectory.id]) for item in (played[0], played[1], played[3])] == [
        4,
        2,
        1,
    ]
    assert played[2].trajectory.id not in found, "it has no picture"
    changes = found[first.id]
    assert changes[2] is None, "no picture precedes it that the turn before had not seen"
    assert {n: changes[n] for n in expected} == pytest.approx(expected, abs=1e-5)
    assert all(abs(change) > 1e-3 for change in expected.values())
    # No other picture has its grid: it gets the patches of one that has fewer.
    assert abs(found[played[3].trajectory.id][0]) > 1e-3  # type: ignore[arg-type]


def test_a_policy_that_cannot_see_has_no_change(tiny_vlm: Path) -> None:
    played = items(tiny_vlm)
    with engine(tiny_vlm) as trainer:
        for name, weights in trainer._parameters.items():
            if "merger" in name:
                torch.nn.init.zeros_(weights.data)
        trainer.train([played], sight=1e6)
        changes = [c for turns in trainer.sight.values() for c in turns if c is not None]
    assert len(changes) == 6
    assert max(map(abs, changes)) < 1e-6


def test_one_step_of_five_has_the_turns_of_five(tiny_vlm: Path) -> None:
    played = [
        dataclasses.replace(
            items(tiny_vlm)[3],
            trajectory=dataclasses.replace(
                items(tiny_vlm)[3].trajectory, id=TrajectoryId(number // 8, number % 8)
            ),
        )
        for number in range(480)
    ]
    counts = []
    with engine(tiny_vlm) as trainer:
        for step in range(6):
            trainer.train([played[80 * step :][:80]], sight=0.1)
            counts.append(len(trainer.sight))
    assert counts[1:5] == [0, 0, 0, 0]
    assert [counts[0], counts[5]] == [20, 20]


def test_what_is_trained_does_not_depend_on_it(tiny_vlm: Path) -> None:
    played, weights = items(tiny_vlm), []
    for share in (0.0, 1e6):
        with engine(tiny_vlm) as trainer:
            trainer.train([played], sight=share)
            weights.append(trainer.export(VERSION))
            assert bool(trainer.sight) == bool(share)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_turns_of_several_contexts_keep_their_numbers(tiny_vlm: Path) -> None:
    item = items(tiny_vlm)[0]
    again = dataclasses.replace(item.trajectory.turns[0], restart=True)
    played = dataclasses.replace(
        item.trajectory, turns=(*item.trajectory.turns[:2], again, *item.trajectory.turns[2:])
    )
    with engine(tiny_vlm) as trainer:
        trainer.train([[TrainItem(played, 1.0), *items(tiny_vlm)[1:]]], sight=1e6)
        found = trainer.sight[played.id]
    assert [change is not None for change in found] == [True, True, False, True]


def test_a_share_with_one_task_has_no_other_picture(tiny_vlm: Path) -> None:
    with engine(tiny_vlm) as trainer:
        trainer.train([items(tiny_vlm)[:1]], sight=1e6)
        assert trainer.sight == {}


@pytest.mark.parametrize("share", [0.005, 0.02, 0.3])
def test_the_tokens_that_are_scored_are_the_share_of_all(tiny_vlm: Path, share: float) -> None:
    scored = total = 0
    template = items(tiny_vlm)[0].trajectory
    turns_scored = [0] * 4
    for step in range(1000):
        candidates, tokens = [], 0
        for sample in range(8):
            played = dataclasses.replace(template, id=TrajectoryId(step, sample))
            candidates += turns_with_pictures(played, 0)
            tokens += sum(len(turn.token_ids) for turn in played.turns)
        chosen = drawn(candidates, share * tokens, 0)
        scored += sum(probe.tokens for probe in chosen)
        total += tokens
        for probe in chosen:
            turns_scored[probe.turn] += 1
    assert scored / total == pytest.approx(share, rel=0.2)
    assert turns_scored[2] == 0
    if share == 0.3:
        assert min(turns_scored[turn] for turn in (0, 1, 3)) > 0.7 * max(turns_scored)


def test_turns_of_as_many_groups_as_possible_are_scored(tiny_vlm: Path) -> None:
    template = items(tiny_vlm)[3].trajectory
    probes = []
    for group in range(6):
        for sample in range(8):
            played = dataclasses.replace(template, id=TrajectoryId(group, sample))
            probes += turns_with_pictures(played, 0)

    def chosen(count: float, seed: int) -> list[TrajectoryId]:
        return [probe.sequence.id for probe in drawn(probes, count * probes[0].tokens, seed)]

    members = Counter(chosen_id.group for chosen_id in chosen(8.0, 0))
    assert sorted(members.values()) == [1, 1, 1, 1, 2, 2]
    assert len(set(chosen(8.0, 0))) == 8
    assert chosen(8.0, 0) != chosen(8.0, 1)


def _of_rank(rank: int, world_size: int, model: Path, meeting: Path) -> object:
    played = items(model)
    # The second rank's share has no picture, and its score is an empty pass.
    share = [played[:2] + played[3:], played[2:3]][rank]
    with engine(model, rank=rank, world_size=world_size, meeting=meeting) as trainer:
        trainer.train([share], sight=1e6)
        return {str(id): changes for id, changes in trainer.sight.items()}


def test_a_rank_without_pictures_takes_part(tiny_vlm: Path, tmp_path: Path) -> None:
    with engine(tiny_vlm) as trainer:
        trainer.train([items(tiny_vlm)], sight=1e6)
        alone = {str(id): changes for id, changes in trainer.sight.items()}
    first, second = run_ranks(_of_rank, 2, tiny_vlm, tmp_path / "meeting")
    assert second == {}
    assert first.keys() == alone.keys()
    for id, changes in first.items():
        assert [c or 0.0 for c in changes] == pytest.approx([c or 0.0 for c in alone[id]], abs=1e-5)
