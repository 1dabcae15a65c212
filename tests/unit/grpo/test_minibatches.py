"""Mini-batches and seeds: partitions at group boundaries that follow from the run's seed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayloop.core.types import derive
from rayloop.grpo.balance import mini_batches
from rayloop.grpo.settings import UpdateSettings


@given(
    st.lists(st.integers(1, 8), max_size=40),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_every_epoch_is_a_partition_of_nearly_equal_parts(
    sizes: list[int], epochs: int, parts: int, step: int
) -> None:
    update = UpdateSettings(epochs=epochs, mini_batches=parts)
    updates = mini_batches(sizes, update, seed=3, step=step)
    count = min(parts, len(sizes))
    assert len(updates) == epochs * count
    for epoch in range(epochs):
        batches = updates[epoch * count : (epoch + 1) * count]
        assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
        filled = [sum(sizes[i] for i in batch) for batch in batches]
        assert not filled or max(filled) - min(filled) <= max(sizes), "no more than a group apart"
    assert updates == mini_batches(sizes, update, seed=3, step=step)


def test_the_order_differs_by_seed_step_and_epoch() -> None:
    update = UpdateSettings(epochs=2, mini_batches=4)
    first = mini_batches([8] * 32, update, seed=0, step=0)
    assert first[:4] != first[4:]
    assert first != mini_batches([8] * 32, update, seed=0, step=1)
    assert first != mini_batches([8] * 32, update, seed=1, step=0)


def test_a_smaller_step_gets_fewer_mini_batches_rather_than_tiny_ones() -> None:
    def filled(*sizes: int) -> list[int]:
        """Trajectories per mini-batch, of a target of 16 groups of 8 in 4."""
        updates = mini_batches(sizes, UpdateSettings(mini_batches=4), 0, 0, nominal=128)
        return [sum(sizes[i] for i in update) for update in updates]

    assert filled(*[8] * 16) == [32] * 4
    assert filled(*[8] * 9) == [40, 32]
    assert filled(*[8] * 3) == [24]
    assert len(filled(*[8] * 20)) == 4
    assert filled(*[2] * 32) == [32, 32], "many partial groups are half a step too"


def test_seeds_are_stable_and_tell_their_parts_apart() -> None:
    assert derive(0, "sampling", 1) == 5418743932690853519
    seeds = [
        derive(0),
        derive(1),
        derive(0, 1),
        derive(0, "1"),
        derive(0, "a", "b"),
        derive(0, "ab"),
        derive(0, "a,b"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
