"""Mini-batches and seeds: partitions at group boundaries that follow from the run's seed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayloop.core.seeds import derive
from rayloop.grpo.minibatches import mini_batches
from rayloop.grpo.settings import UpdateSettings


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_is_a_partition_of_nearly_equal_parts(groups: int, epochs: int, parts: int, step: int) -> None:
    update = UpdateSettings(epochs=epochs, mini_batches=parts)
    updates = mini_batches(groups, update, seed=3, step=step)
    count = min(parts, groups)
    assert len(updates) == epochs * count
    for epoch in range(epochs):
        batches = updates[epoch * count : (epoch + 1) * count]
        assert sorted(i for batch in batches for i in batch) == list(range(groups))
        sizes = {len(batch) for batch in batches}
        assert not sizes or max(sizes) - min(sizes) <= 1
    assert updates == mini_batches(groups, update, seed=3, step=step)


def test_the_order_differs_by_seed_step_and_epoch() -> None:
    update = UpdateSettings(epochs=2, mini_batches=4)
    first = mini_batches(32, update, seed=0, step=0)
    assert first[:4] != first[4:]
    assert first != mini_batches(32, update, seed=0, step=1)
    assert first != mini_batches(32, update, seed=1, step=0)


def test_a_smaller_step_gets_fewer_mini_batches_rather_than_tiny_ones() -> None:
    update = UpdateSettings(mini_batches=4)
    assert [len(b) for b in mini_batches(16, update, 0, 0, nominal=16)] == [4, 4, 4, 4]
    assert [len(b) for b in mini_batches(9, update, 0, 0, nominal=16)] == [5, 4]
    assert [len(b) for b in mini_batches(3, update, 0, 0, nominal=16)] == [3]
    assert len(mini_batches(20, update, 0, 0, nominal=16)) == 4


def test_seeds_are_stable_and_tell_their_parts_apart() -> None:
    assert derive(0, "sampling", 1) == 5418743932690853519
    seeds = [derive(0), derive(1), derive(0, 1), derive(0, "1"), derive(0, "a", "b"), derive(0, "ab"), derive(0, "a,b")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
