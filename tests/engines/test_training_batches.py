"""Packing and scoring: micro-batches, masks, chunks, and packed samples that do not see each other."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayloop.core.failures import DataFailure
from rayloop.core.protocols import TrainItem
from rayloop.core.types import EndReason, Sampling, Trajectory, TrajectoryId, Turn
from rayloop.engines.attention import PACKED_SDPA, PACKED_VISION, shares_prefixes
from rayloop.engines.models import load_model, positions
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.engines.training import collator
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.scorer import FrozenScorer, Scorer, masked_logprobs
from rayloop.grpo.batch import Batch, TrainSample, make_sample
from rayloop.grpo.packing import micro_batches, pack
from tests.engines.training import VERSION, mixed_items, trajectory

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_micro_batches_hold_every_sample_once_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    groups = micro_batches(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or sum(lengths[i] for i in group) <= budget for group in groups)
    small = [
        sum(lengths[i] for i in group)
        for group in groups
        if sum(lengths[i] for i in group) <= budget
    ]
    assert all(a + b > budget for a, b in itertools.pairwise(small))


def _text_sample(
    *turns: Turn, sampling: Sampling | None = None, ref_logprobs: list[float] | None = None
) -> TrainSample:
    played = Trajectory(
        TrajectoryId(7, 0), 0, "t", 0, turns, sampling or Sampling(), EndReason.DONE
    )
    flat = played.flatten()
    return make_sample(
        TrainItem(played, 1.0, ref_logprobs), flat, torch.arange(len(flat.token_ids))[None]
    )


def _turn(*tokens: int) -> Turn:
    return Turn("assistant", tokens, (), (-1.0,) * len(tokens), VERSION)


def test_a_sampled_token_is_predicted_by_the_one_before_it_in_its_own_sample() -> None:
    first = _text_sample(Turn("user", (1, 2)), _turn(3, 4), Turn("user", (5,)), _turn(6))
    second = _text_sample(Turn("user", (7,)), _turn(8))
    batch = pack([first, second])
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[[0, 1, 2, 3, 4, 5, 0, 1]]]
    assert batch.predict.tolist() == [1, 2, 4, 6]
    assert batch.targets.tolist() == [3, 4, 6, 8]
    assert batch.trajectory_ids.tolist() == [0, 0, 0, 1]


def test_min_tokens_counts_within_the_turn() -> None:
    sampling = Sampling(min_tokens=1, end_tokens=(9,), temperature=0.0)
    batch = pack(
        [
            _text_sample(
                Turn("user", (1,)), _turn(3, 9), Turn("user", (1,)), _turn(4, 4), sampling=sampling
            )
        ]
    )
    assert batch.ban_end.tolist() == [True, False, True, False]
    assert batch.temperature.tolist() == [1.0] * 4


def test_what_cannot_have_been_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="7/0: its first token is a sampled one"):
        _text_sample(_turn(1, 2))
    with pytest.raises(ValueError, match="sampled token 5 at position 1"):
        _text_sample(Turn("user", (1,)), _turn(2, 5), sampling=Sampling(banned_tokens=(5,)))
    with pytest.raises(ValueError, match="sampled token 9 at position 0"):
        _text_sample(Turn("user", (1,)), _turn(9), sampling=Sampling(end_tokens=(9,), min_tokens=1))
    with pytest.raises(ValueError, match="reference log-probs for 1 sampled tokens"):
        _text_sample(Turn("user", (1,)), _turn(2), ref_logprobs=[-1.0, -1.0])


def test_samples_that_disagree_are_not_packed() -> None:
    plain = _text_sample(Turn("user", (1,)), _turn(2))
    with pytest.raises(ValueError, match="1 of 2 packed samples lack reference log-probs"):
        pack([plain, _text_sample(Turn("user", (1,)), _turn(2), ref_logprobs=[-1.0])])
    with pytest.raises(ValueError, match="2 different pairs of banned_tokens"):
        pack(
            [
                plain,
                _text_sample(Turn("user", (1,)), _turn(2), sampling=Sampling(banned_tokens=(5,))),
            ]
        )


def test_masked_logprobs_are_those_of_the_remaining_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5], [1.0, 2.0, 3.0, 0.5]], requires_grad=True)
    logp = masked_logprobs(
        logits,
        torch.tensor([0.5, 2.0]),
        torch.tensor([True, False]),
        torch.tensor([0]),
        torch.tensor([2]),
    )
    assert torch.allclose(logp[0, [1, 3]], (logits[0, [1, 3]] / 0.5).log_softmax(0))
    assert torch.allclose(logp[1, 1:], (logits[1, 1:] / 2.0).log_softmax(0))
    assert logp[0, [0, 2]].exp().tolist() == [0.0, 0.0]
    (-(logp.exp() * logp).sum()).backward()
    assert torch.isfinite(logits.grad).all()


class Lab:
    """A tiny model with its scorer and collator."""

    def __init__(
        self, folder: Path, chunk: int = 2048, settings: FsdpSettings | None = None
    ) -> None:
        model = ModelSettings(path=str(folder))
        self.model = load_model(model)
        self.scorer = Scorer(self.model, chunk)
        self.collator = Collator(self.model, model, settings or FsdpSettings(), CPU)

    def samples(self, items: list[TrainItem]) -> list[TrainSample]:
        return [self.collator.sample(item) for item in items]

    def gradients(self) -> dict[str, Tensor]:
        gradients = {
            n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None
        }
        self.model.zero_grad()
        return gradients


@pytest.mark.parametrize("attention", [PACKED_SDPA, "sdpa", "eager"])
def test_packed_samples_do_not_see_each_other(tiny_vlm: Path, attention: str) -> None:
    lab = Lab(tiny_vlm)
    assert lab.model.base_model.language_model.config._attn_implementation == PACKED_SDPA
    assert lab.model.base_model.visual.config._attn_implementation == PACKED_VISION
    if attention != PACKED_SDPA:
        lab.model.set_attn_implementation(attention)
    shapes = [[(6, (2, 3), 4), (3, (4, 2), 5), (2, (1, 2), 3)], [(8, None, 6)], [(4, (3, 3), 5)]]
    samples = lab.samples(
        [TrainItem(trajectory(tiny_vlm, i, turns), 1.0) for i, turns in enumerate(shapes)]
    )
    packed = lab.scorer(lab.collator.batch(samples)).logprobs
    direction = torch.randn(packed.shape, generator=torch.Generator().manual_seed(0))
    (packed * direction).sum().backward()
    packed_gradients = lab.gradients()

    separate = torch.cat([lab.scorer(pack([sample])).logprobs for sample in samples])
    assert (packed - separate).abs().max() < 1e-5
    (separate * direction).sum().backward()
    for name, gradient in lab.gradients().items():
        assert (gradient - packed_gradients[name]).norm() < 1e-5 * gradient.norm().clamp_min(1.0), (
            name
        )


def test_packed_attention_equals_transformers_own(tiny_vlm: Path) -> None:
    """Samples shorter and longer than what plain attention computes, images with windows of several
    sizes.
    """
    lab = Lab(tiny_vlm)
    shapes = [
        [(6, (3, 4), 4), (3, (5, 2), 5)],
        [(8, None, 6)],
        [(150, (3, 3), 5)],
        [(4, (13, 11), 5)],
    ]
    samples = lab.samples(
        [TrainItem(trajectory(tiny_vlm, i, turns), 1.0) for i, turns in enumerate(shapes)]
    )
    found = []
    for attention in (PACKED_SDPA, "eager"):
        if attention != PACKED_SDPA:
            lab.model.set_attn_implementation(attention)
        logprobs = lab.scorer(lab.collator.batch(samples)).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append((logprobs.detach(), lab.gradients()))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5
    for name, gradient in found[1][1].items():
        assert (gradient - found[0][1][name]).norm() < 1e-5 * gradient.norm().clamp_min(1.0), name


def test_samples_of_a_group_share_an_image_without_effect(tiny_vlm: Path) -> None:
    lab = Lab(tiny_vlm)
    played = [
        trajectory(tiny_vlm, 0, [(6, (2, 3), 4)]),
        trajectory(tiny_vlm, 1, [(5, (2, 2), 3), (2, (1, 2), 3)]),
    ]
    samples = lab.samples([TrainItem(played[i], 1.0) for i in (0, 1, 0, 1)])
    shared, repeated = pack(samples, share_images=True), pack(samples)
    assert len(shared.image_grid) == 3
    assert len(repeated.image_grid) == 6
    found = []
    for batch in (shared, repeated):
        logprobs = lab.scorer(batch).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append((logprobs.detach(), lab.gradients()))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5
    for name, gradient in found[1][1].items():
        assert (gradient - found[0][1][name]).norm() < 1e-5 * gradient.norm().clamp_min(1.0), name


def test_samples_of_a_group_share_their_prompt_without_effect(tiny_vlm: Path) -> None:
    """One turn and several, later turns with images, other groups in between, and a prompt that
    nothing follows.
    """
    lab = Lab(tiny_vlm)
    assert shares_prefixes(lab.model)
    shapes = [[(6, (2, 3), 4), (3, (1, 2), 5)], [(140, (2, 2), 3)], [(7, None, 6), (2, None, 2)]]
    groups = [
        [_continued(trajectory(tiny_vlm, i, turns), member) for member in range(3)]
        for i, turns in enumerate(shapes)
    ]
    groups[2].insert(0, dataclasses.replace(groups[2][0], turns=groups[2][0].turns[:1]))
    samples = lab.samples([TrainItem(played, 1.0) for group in groups for played in group])
    image_token = lab.model.config.image_token_id
    shared = pack(samples, share_images=True, share_prefixes=True, image_token=image_token)
    repeated = pack(samples)
    prompts = [group[0].prompt_length for group in (samples[:3], samples[3:6], samples[6:])]
    assert (
        repeated.token_ids.numel() - shared.token_ids.numel()
        == 2 * prompts[0] + 2 * prompts[1] + 3 * prompts[2]
    )
    assert shared.targets.equal(repeated.targets)
    found = []
    for batch in (shared, repeated):
        logprobs = lab.scorer(batch).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append((logprobs.detach(), lab.gradients()))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5
    for name, gradient in found[1][1].items():
        assert (gradient - found[0][1][name]).norm() < 1e-5 * gradient.norm().clamp_min(1.0), name


def _continued(played: Trajectory, member: int) -> Trajectory:
    """A group's ``member``: other sampled tokens, one more of them in each turn than the member
    before.
    """
    turns = [
        (
            dataclasses.replace(
                turn,
                token_ids=(*(token - member for token in turn.token_ids), *[70] * member),
                logprobs=(*(turn.logprobs or ()), *[-1.0] * member),
            )
            if turn.sampled
            else turn
        )
        for turn in played.turns
    ]
    return dataclasses.replace(played, id=TrajectoryId(played.id.group, member), turns=tuple(turns))


def test_a_group_is_planned_together_and_cut_at_the_budget(tiny_vlm: Path) -> None:
    lab = Lab(tiny_vlm, settings=FsdpSettings(micro_batch_tokens=40))
    a, b = (
        [_continued(trajectory(tiny_vlm, i, [(10, None, 4)]), m) for m in range(4)]
        for i in range(2)
    )
    samples = lab.samples(
        [TrainItem(played, 1.0) for pair in zip(a, b, strict=True) for played in pair]
    )
    number = {id(sample): i for i, sample in enumerate(samples)}
    plan = [[number[id(sample)] for sample in group] for group in lab.collator.plan(samples)]
    assert [sorted(part) for part in plan] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [
        lab.collator.batch([samples[i] for i in group]).trajectory_ids.max() for group in plan
    ] == [
        3,
        3,
    ]
    lab.model.set_attn_implementation("sdpa")
    assert [len(group) for group in lab.collator.plan(samples)] == [2, 2, 2, 2]
    dummy = 1
    assert (
        lab.collator.batch(samples).token_ids.numel()
        == sum(sample.length for sample in samples) + dummy
    )


def test_what_a_group_has_in_common_is_made_once(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions and pixels; the positions are those of each whole sequence, images in later turns
    included.
    """
    shapes = [[(6, (2, 3), 4), (3, (1, 2), 5), (2, None, 3)], [(4, (2, 2), 3)], [(7, None, 6)]]
    played = [
        _continued(trajectory(tiny_vlm, i, turns), m)
        for i, turns in enumerate(shapes)
        for m in range(3)
    ]
    lab = Lab(tiny_vlm)
    made: list[int] = []

    def counted(model: Any, token_ids: Tensor, grids: Tensor) -> Tensor:
        made.append(len(token_ids))
        return positions(model, token_ids, grids)

    monkeypatch.setattr(collator, "positions", counted)
    samples = lab.samples([TrainItem(one, 1.0) for one in played])
    for sample, one in zip(samples, played, strict=True):
        grids = torch.tensor([image.grid for image in one.images]).reshape(-1, 3)
        whole = positions(lab.model, torch.from_numpy(one.flatten().token_ids), grids)
        assert torch.equal(sample.position_ids, whole)
    assert len(made) == 3 + 1 + 1, "a later image follows answers of its own"
    assert len({pixels for sample in samples for pixels in sample.pixels}) == 2 + 1


def test_an_image_that_cannot_be_decoded_is_reported_by_its_batch(tiny_vlm: Path) -> None:
    lab = Lab(tiny_vlm)
    played = trajectory(tiny_vlm, 0, [(6, (2, 3), 4)])
    (sample,) = lab.samples([TrainItem(dataclasses.replace(played, image_bytes={}), 1.0)])
    with pytest.raises(
        DataFailure, match=f"image {played.images[0].sha256[:12]}: .*neither bytes nor a path"
    ):
        lab.collator.batch([sample])
    (again,) = lab.samples([TrainItem(played, 1.0)])
    assert len(lab.collator.batch([again]).pixel_values) == played.images[0].tokens * 4, (
        "another has the bytes"
    )


def test_the_next_batch_is_packed_while_the_present_one_is_used(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches, bit for bit, each packed before it is asked for, and in another thread."""
    lab = Lab(tiny_vlm, settings=FsdpSettings(micro_batch_tokens=1))
    items = [TrainItem(trajectory(tiny_vlm, n, [(4, (2, 3), 5)]), 1.0) for n in range(3)]
    plan: list[list[TrainSample]] = [*lab.collator.plan(lab.samples(items)), []]
    alone = [lab.collator.batch(part) for part in plan]
    packed = [threading.Event() for _ in plan]
    where: set[str] = set()

    def observed(samples: Sequence[TrainSample], **options: Any) -> Batch:
        made = pack(samples, **options)
        where.add(threading.current_thread().name.split("_")[0])
        next(event for event in packed if not event.is_set()).set()
        return made

    monkeypatch.setattr(collator, "pack", observed)
    for number, (batch, expected) in enumerate(zip(lab.collator.ahead(plan), alone, strict=True)):
        assert all(event.wait(10) for event in packed[: number + 2]), (
            "nobody has asked for the next one yet"
        )
        assert not any(event.is_set() for event in packed[number + 2 :]), (
            "one is enough: they take memory"
        )
        for field in dataclasses.fields(Batch):
            one, other = (getattr(made, field.name) for made in (batch, expected))
            assert (one is None and other is None) or torch.equal(one, other), field.name
    assert where == {"packing"}
    assert list(lab.collator.ahead([])) == []


def test_a_batch_that_cannot_be_packed_fails_in_its_turn(tiny_vlm: Path) -> None:
    lab = Lab(tiny_vlm)
    played = [trajectory(tiny_vlm, n, [(6, (2, 3), 4)]) for n in range(3)]
    good, _, last = lab.samples([TrainItem(one, 1.0) for one in played])
    (broken,) = lab.samples(
        [
            TrainItem(
                dataclasses.replace(trajectory(tiny_vlm, 7, [(6, (2, 3), 4)]), image_bytes={}), 1.0
            )
        ]
    )
    batches = lab.collator.ahead([[good], [broken], [last]])
    assert next(batches).trajectory_ids.max() == 0
    with pytest.raises(DataFailure, match="neither bytes nor a path"):
        next(batches)
    assert list(batches) == []


def test_positions_of_images_matter(tiny_vlm: Path) -> None:
    """The test above could not fail if positions had no effect."""
    lab = Lab(tiny_vlm)
    (sample,) = lab.samples([TrainItem(trajectory(tiny_vlm, 0, [(6, (2, 3), 4)]), 1.0)])
    flat = dataclasses.replace(sample, position_ids=torch.arange(sample.length).expand(4, -1))
    difference = lab.scorer(pack([sample])).logprobs - lab.scorer(pack([flat])).logprobs
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("chunk", [1, 3, 2048])
def test_chunks_equal_the_plain_log_softmax(tiny_text: Path, chunk: int) -> None:
    lab = Lab(tiny_text, chunk)
    sampling = Sampling(temperature=0.7, banned_tokens=(3, 4), end_tokens=(2,), min_tokens=2)
    samples = lab.samples(
        [TrainItem(trajectory(tiny_text, 1, [(6, None, 4), (2, None, 3)], sampling), 1.0)]
    )
    rows: list[int] = []
    lab.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    batch = lab.collator.batch(samples)
    scores = lab.scorer(batch, entropy=True)
    assert max(rows) <= chunk

    logits = lab.model(input_ids=batch.token_ids).logits[0, batch.predict] / 0.7
    logits[:, [3, 4]] = -torch.inf
    logits[batch.ban_end, 2] = -torch.inf
    plain = torch.distributions.Categorical(logits=logits)
    assert batch.ban_end.tolist() == [True, True, False, False, True, True, False]
    assert (scores.logprobs - plain.log_prob(batch.targets)).abs().max() < 1e-5
    probabilities = plain.probs
    assert (scores.entropy - torch.special.entr(probabilities).sum(1)).abs().max() < 1e-5


def test_logits_of_one_chunk_are_kept_for_the_backward_pass(tiny_text: Path) -> None:
    """Of the last, with which it begins; the others are computed again, one after the other."""
    lab = Lab(tiny_text, chunk=2)
    batch = lab.collator.batch(
        lab.samples([TrainItem(trajectory(tiny_text, 1, [(6, None, 9)]), 1.0)])
    )
    saved: list[torch.Size] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        lab.scorer(batch, entropy=True).logprobs.sum()
    vocabulary = lab.model.config.vocab_size
    assert saved
    head = lab.model.get_output_embeddings().weight.shape[
        1
    ]  # its transposed weight has as many columns
    logits = {
        shape for shape in saved if len(shape) == 2 and shape[1] == vocabulary and shape[0] != head
    }
    assert logits == {(1, vocabulary)}


def test_a_text_only_batch_of_a_vision_model_has_a_dummy_image_without_effect(
    tiny_vlm: Path,
) -> None:
    lab = Lab(tiny_vlm)
    samples = lab.samples([TrainItem(trajectory(tiny_vlm, 1, [(6, None, 4)]), 1.0)])
    batch = lab.collator.batch(samples)
    assert batch.pixel_values is not None
    assert pack(samples).pixel_values is None
    assert (lab.scorer(batch).logprobs - lab.scorer(pack(samples)).logprobs).abs().max() < 1e-5
    lab.scorer(batch).logprobs.sum().backward()
    vision = [g for name, g in lab.gradients().items() if "visual" in name]
    assert vision
    assert not any(gradient.any() for gradient in vision)


@pytest.mark.parametrize("model", ["tiny_vlm", "tiny_text"])
def test_an_empty_batch_gives_zero_gradients(request: pytest.FixtureRequest, model: str) -> None:
    lab = Lab(request.getfixturevalue(model))
    scores = lab.scorer(lab.collator.batch([]), entropy=True)
    assert scores.logprobs.shape == (0,)
    scores.logprobs.sum().backward()
    gradients = lab.gradients()
    assert set(gradients) == {name for name, _ in lab.model.named_parameters()}
    assert not any(gradient.any() for gradient in gradients.values())


def test_the_frozen_scorer_does_not_depend_on_micro_batches(tiny_vlm: Path) -> None:
    played = [item.trajectory for item in mixed_items(tiny_vlm)]
    settings = ModelSettings(path=str(tiny_vlm))
    packed = FrozenScorer(settings, FsdpSettings()).logprobs(played)
    single = FrozenScorer(settings, FsdpSettings(micro_batch_tokens=1)).logprobs(played)
    for trajectory_, a, b in zip(played, packed, single, strict=True):
        assert a.shape == (int(trajectory_.flatten().loss_mask.sum()),)
        assert abs(a - b).max() < 1e-5


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    banned=st.frozensets(st.integers(0, 9), max_size=3),
    ends=st.frozensets(st.integers(0, 9), max_size=3),
    least=st.integers(0, 5),
)
def test_exactly_what_its_sampling_allows_is_accepted(
    tokens: list[int], banned: frozenset[int], ends: frozenset[int], least: int
) -> None:
    sampling = Sampling(banned_tokens=tuple(banned), end_tokens=tuple(ends), min_tokens=least)
    wrong = [
        i for i, token in enumerate(tokens) if token in banned or (i < least and token in ends)
    ]
    if not wrong:
        _text_sample(Turn("user", (1,)), _turn(*tokens), sampling=sampling)
        return
    with pytest.raises(
        ValueError, match=f"sampled token {tokens[wrong[0]]} at position {wrong[0]} "
    ):
        _text_sample(Turn("user", (1,)), _turn(*tokens), sampling=sampling)
