"""The contexts of an episode share what they have in common, without an effect on what is learned."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.histories import HISTORIES, contexts_of, distinct_tokens
from rayloop.core.protocols import TrainItem
from rayloop.core.types import Task, Trajectory
from rayloop.engines import attention
from rayloop.engines.settings import FsdpSettings
from rayloop.envs.episode import summarize
from rayloop.grpo.balance import MemberLength
from rayloop.grpo.batch import TrainSample
from rayloop.grpo.packing import pack, prefix_groups
from tests.engines.test_training_batches import Lab

TURNS = 6


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("flex", [False, True])
def test_contexts_in_one_row_have_the_values_and_gradients_of_contexts_alone(
    tiny_vlm: Path, name: str, flex: bool
) -> None:
    lab = Lab(tiny_vlm)
    samples = _samples(lab, tiny_vlm, name)
    image_token = lab.model.config.image_token_id
    (group,) = prefix_groups(samples, 1 << 20, image_token)
    ordered = group.samples
    shared = pack(ordered, share_images=True, share_prefixes=True, image_token=image_token)
    assert shared.token_ids.numel() == group.tokens == distinct_tokens(samples, image_token)
    if flex:
        # FlexAttention has no backward pass on a CPU.
        lab.model.set_attn_implementation({"": "packed_flex", "text_config": "packed_flex"})
        attention.AttentionInterface.register("packed_flex", attention._packed_flex)
        with torch.no_grad():
            found = lab.scorer(shared).logprobs
            alone = torch.cat([lab.scorer(pack([sample])).logprobs for sample in ordered])
        assert (found - alone).abs().max() < 1e-5
        return

    logprobs = lab.scorer(shared).logprobs
    weights = torch.linspace(-1, 1, len(logprobs))
    (logprobs * weights).sum().backward()
    gradients = lab.gradients()
    alone = torch.cat([lab.scorer(pack([sample])).logprobs for sample in ordered])
    (alone * weights).sum().backward()
    assert (logprobs - alone).abs().max() < 1e-5
    for parameter, gradient in lab.gradients().items():
        difference = (gradient - gradients[parameter]).norm()
        assert difference < 1e-5 * gradient.norm().clamp_min(1.0), parameter


@pytest.mark.parametrize(("budget", "parts"), [(4096, 6), (16384, 2)])
def test_a_plan_computes_little_more_than_the_distinct_tokens(
    tiny_vlm: Path, budget: int, parts: int
) -> None:
    """Sixteen turns, of which four are shown: 256 tokens of a screenshot, 333 of the task."""
    lab = Lab(tiny_vlm, settings=FsdpSettings(micro_batch_tokens=budget))
    samples = _samples(lab, tiny_vlm, "last_turns(4)", turns=16, size=(448, 448))
    image_token = lab.model.config.image_token_id
    assert len(samples) == 13
    batches = [lab.collator.batch(part) for part in lab.collator.plan(samples)]
    computed = sum(batch.token_ids.numel() for batch in batches)
    distinct = distinct_tokens(samples, image_token)
    repeated = sum(sample.length for sample in samples)
    print(f"\n{computed} computed, {distinct} distinct, {repeated} with what is shared each time")
    assert len(batches) == parts
    assert computed <= 1.15 * distinct
    assert computed < repeated
    predicted = sum(batch.predict.numel() for batch in batches)
    assert predicted == sum(len(sample.predict) for sample in samples)


@pytest.mark.parametrize("name", HISTORIES)
def test_a_trajectory_weighs_the_tokens_that_are_computed(tiny_vlm: Path, name: str) -> None:
    """Where all its contexts are in one row."""
    lab = Lab(tiny_vlm)
    image_token = lab.model.config.image_token_id
    trajectory = contexts_of(tiny_vlm, HISTORIES[name], turns=16)
    samples = lab.samples([TrainItem(segment, 1.0) for segment in trajectory.segments])
    summary = summarize(trajectory, Task("t", ()), 1.0, image_token)
    weight = sum(MemberLength.of(summary))
    (row,) = prefix_groups(samples, 1 << 20, image_token)
    print(f"\n{name}: weighs {weight}, computes {row.tokens}, {summary.length} with repetitions")
    assert summary.length == sum(sample.length for sample in samples)
    assert weight == row.tokens
    assert (weight < summary.length) == (len(samples) > 1)


def test_other_images_are_no_common_beginning(tiny_vlm: Path) -> None:
    """Image tokens are the same for all images."""
    lab = Lab(tiny_vlm)
    image_token = lab.model.config.image_token_id
    first, second = _samples(lab, tiny_vlm, "full"), _samples(lab, tiny_vlm, "full", seed=1)
    assert first[0].token_ids.equal(second[0].token_ids)
    length = first[0].length
    (alike,) = prefix_groups([*first, *first], 1 << 20, image_token)
    assert alike.tokens == length
    (different,) = prefix_groups([*first, *second], 1 << 20, image_token)
    before_the_image = first[0].token_ids.tolist().index(image_token)
    assert different.tokens == 2 * length - before_the_image


def test_the_order_of_a_plan_does_not_depend_on_addresses(tiny_vlm: Path) -> None:
    """A resume repeats the micro-batches bit for bit."""
    plans = []
    for _ in range(2):
        lab = Lab(tiny_vlm)
        samples = [
            *_samples(lab, tiny_vlm, "last_images(2)"),
            *_samples(lab, tiny_vlm, "full", seed=3),
        ]
        groups = prefix_groups(samples, 600, lab.model.config.image_token_id)
        number = {id(sample): i for i, sample in enumerate(samples)}
        plans.append([[number[id(sample)] for sample in group.samples] for group in groups])
    assert plans[0] == plans[1]
    assert sorted(chain.from_iterable(plans[0])) == list(range(len(samples)))


def _samples(
    lab: Any, folder: Path, name: str, turns: int = TURNS, **options: Any
) -> list[TrainSample]:
    trajectory = contexts_of(folder, HISTORIES[name], turns, **options)
    segments: tuple[Trajectory, ...] = trajectory.segments
    samples: list[TrainSample] = lab.samples([TrainItem(segment, 1.0) for segment in segments])
    return samples
