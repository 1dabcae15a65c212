"""Training with top_p and top_k: log-probs over the tokens that the engine kept, packed, scored and
compared with the engine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rayloop.core.protocols import TrainItem
from rayloop.core.token_mask import TokenMask
from rayloop.core.types import Completion, EndReason, Sampling, Trajectory, TrajectoryId, Turn
from rayloop.engines.models import load_model
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.scorer import FrozenScorer, Scorer
from rayloop.grpo.batch import make_sample
from rayloop.grpo.packing import pack
from tests.contracts.test_engine import Served, questions
from tests.engines.training import engine as trainer
from tests.engines.training import trajectory

pytestmark = pytest.mark.timeout(300)

TRUNCATED = Sampling(0.7, top_p=0.8, banned_tokens=(3,), end_tokens=(2,), min_tokens=1)


def with_kept(played: Trajectory, seed: int) -> Trajectory:
    """Random tokens are kept at each position, and the sampled one among them, at a random place."""
    rng = np.random.default_rng(seed)

    def token_mask(turn: Turn) -> TokenMask:
        rows = [
            rng.choice(np.arange(64, 320), rng.integers(0, 9), replace=False).tolist()
            for _ in turn.token_ids
        ]
        rows = [
            [other for other in row if other != token]
            for row, token in zip(rows, turn.token_ids, strict=True)
        ]
        for row, token in zip(rows, turn.token_ids, strict=True):
            row.insert(int(rng.integers(0, len(row) + 1)), token)
        return TokenMask.of(rows)

    turns = tuple(
        dataclasses.replace(turn, token_mask=token_mask(turn)) if turn.sampled else turn
        for turn in played.turns
    )
    return dataclasses.replace(played, turns=turns)


def text_items(folder: Path) -> list[TrainItem]:
    """Two whose tokens were truncated, around one whose tokens were not."""
    shapes = [[(6, None, 4), (2, None, 3)], [(5, None, 5)], [(9, None, 6)]]
    played = [trajectory(folder, number, turns, TRUNCATED) for number, turns in enumerate(shapes)]
    whole = dataclasses.replace(played[1], sampling=dataclasses.replace(TRUNCATED, top_p=1.0))
    return [
        TrainItem(one, 1.0) for one in (with_kept(played[0], 0), whole, with_kept(played[2], 2))
    ]


def dense(logits: Tensor, items: Sequence[TrainItem]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] of the sampled tokens, position by position, from the logits [N,
    V] that predict them.
    """
    found, entropies, at = [], [], 0
    for item in items:
        for turn in item.trajectory.sampled_turns:
            rows = [None] * len(turn.token_ids)
            if turn.token_mask is not None:
                ids, counts = (
                    np.frombuffer(data, np.int32)
                    for data in (turn.token_mask.ids, turn.token_mask.counts)
                )
                rows = np.split(ids, counts.cumsum()[:-1])
            for position, (token, row) in enumerate(zip(turn.token_ids, rows, strict=True)):
                banned = {3, 2} if position < 1 else {3}
                every = (
                    [t for t in range(logits.shape[1]) if t not in banned]
                    if row is None
                    else row.tolist()
                )
                logp = (logits[at, every] / 0.7).log_softmax(0)
                found.append(logp[every.index(token)])
                entropies.append(-(logp.exp() * logp).sum())
                at += 1
    return torch.stack(found), torch.stack(entropies)


@pytest.mark.parametrize("chunk", [1, 3, 2048])
def test_logprobs_entropies_and_gradients_are_over_the_kept_tokens(
    tiny_text: Path, chunk: int
) -> None:
    settings = ModelSettings(path=str(tiny_text))
    model = load_model(settings)
    items = text_items(tiny_text)
    collator = Collator(model, settings, FsdpSettings(), torch.device("cpu"))
    scorer = Scorer(model, chunk, learns_entropy=True)
    rows: list[int] = []
    hook = model.lm_head.register_forward_hook(
        lambda module, inputs, output: rows.append(len(output))
    )
    batch = collator.batch([collator.sample(item) for item in items])
    scores = scorer(batch, entropy=True)
    assert max(rows) <= chunk
    hook.remove()

    logits = torch.cat(
        [model(input_ids=torch.tensor([_tokens(item)])).logits[0, _predict(item)] for item in items]
    )
    logprobs, entropies = dense(logits, items)
    assert (scores.logprobs - logprobs).abs().max() < 1e-5
    assert (scores.entropy - entropies).abs().max() < 1e-5
    direction = torch.linspace(-1, 1, len(logprobs))
    gradients = []
    for values, spread in ((scores.logprobs, scores.entropy), (logprobs, entropies)):
        ((values + 0.5 * spread) * direction).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    for name, gradient in gradients[1].items():
        assert (gradient - gradients[0][name]).norm() < 1e-5 * gradient.norm().clamp_min(1.0), name


def _tokens(item: TrainItem) -> list[int]:
    return [token for turn in item.trajectory.turns for token in turn.token_ids]


def _predict(item: TrainItem) -> list[int]:
    flat = item.trajectory.flatten()
    return (flat.loss_mask.nonzero()[0] - 1).tolist()


def test_packed_kept_tokens_stay_with_their_positions(tiny_text: Path) -> None:
    items = text_items(tiny_text)
    samples = [
        make_sample(item, item.trajectory.flatten(), torch.arange(len(_tokens(item)))[None])
        for item in items
    ]
    batch = pack(samples)
    assert batch.token_mask.dtype == torch.int32
    expected = [
        sorted({*row}) for item in (items[0], items[2]) for row in _kept_rows(item.trajectory)
    ]
    packed = [sorted({*row}) for row in batch.token_mask.tolist()]
    assert packed == [*expected[:7], *[[-1]] * 5, *expected[7:]]
    assert pack(samples[1:2]).token_mask is None
    assert batch.to("cpu").token_mask.equal(batch.token_mask)


def _kept_rows(played: Trajectory) -> list[list[int]]:
    return [
        row
        for turn in played.sampled_turns
        for row in (turn.token_mask.padded().tolist() if turn.token_mask else [])
    ]


def test_kept_tokens_stay_with_the_segments_of_a_trajectory(tiny_text: Path) -> None:
    """A context that begins anew is a sequence of its own: log-probs are as those of two
    trajectories.
    """
    first, second = (
        with_kept(trajectory(tiny_text, n, [(6, None, 4)], TRUNCATED), n) for n in range(2)
    )
    begun = dataclasses.replace(second.turns[0], restart=True)
    both = dataclasses.replace(first, turns=(*first.turns, begun, *second.turns[1:]))
    scorer = FrozenScorer(ModelSettings(path=str(tiny_text)), FsdpSettings())
    joined, *apart = scorer.logprobs([both, first, second])
    assert abs(joined - np.concatenate(apart)).max() < 1e-5


@pytest.mark.parametrize(
    ("token_mask", "says"),
    [
        (
            None,
            (
                r"7/0: top_p is 0\.8 and top_k None, and its engine returned 0 sets of kept tokens"
                r" for 2 sampled tokens"
            ),
        ),
        (TokenMask.of([[4]]), r"7/0: .* returned 1 sets of kept tokens for 2 sampled tokens"),
        (
            TokenMask.of([[8, 4], [6, 9]]),
            r"7/0: .* sampled token 5 at position 1 of its turn is not one of the kept tokens",
        ),
    ],
)
def test_a_token_that_was_not_kept_cannot_have_been_sampled(
    token_mask: TokenMask | None, says: str
) -> None:
    turns = (Turn("user", (1,)), Turn("assistant", (4, 5), (), (-1.0, -1.0), token_mask=token_mask))
    played = Trajectory(TrajectoryId(7, 0), 0, "t", 0, turns, Sampling(top_p=0.8), EndReason.DONE)
    with pytest.raises(ValueError, match=says):
        make_sample(TrainItem(played, 1.0), played.flatten(), torch.arange(3)[None])


def test_a_position_without_kept_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no token was kept"):
        TokenMask.of([[4], []])


# Against the engines ------------------------------------------------------------------------------


@pytest.fixture(
    scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def served(request: pytest.FixtureRequest, tiny_text: Path) -> Iterator[Served]:
    engine = Served(request.param, tiny_text)
    engine.run(engine.load(engine.start))
    try:
        yield engine
    finally:
        engine.close()


def mean_ratio(found: Sequence[np.ndarray], played: Sequence[Trajectory]) -> float:
    """The mean of exp(logprobs - rollout_logprobs) over all sampled tokens."""
    flats = [one.flatten() for one in played]
    rollout_logprobs = np.concatenate([flat.rollout_logprobs[flat.loss_mask] for flat in flats])
    return float(np.exp(np.concatenate(found) - rollout_logprobs).mean())


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_ratio_of_present_weights_is_one_over_the_kept_tokens_only(
    served: Served, temperature: float
) -> None:
    """Over all tokens it is the probability of those that were kept."""
    sampling = Sampling(temperature, max_tokens=24, top_p=0.8)
    requests = [
        dataclasses.replace(request, seed=seed)
        for seed, request in enumerate(questions(served.folder))
    ]
    done: list[Completion] = served.many(*((request, sampling) for request in requests))
    played = [
        Trajectory(
            TrajectoryId(n, 0),
            0,
            "t",
            n,
            (Turn("prompt", request.token_ids), one.turn),
            sampling,
            EndReason.DONE,
        )
        for n, (request, one) in enumerate(zip(requests, done, strict=True))
    ]
    whole = [
        dataclasses.replace(one, sampling=dataclasses.replace(sampling, top_p=1.0))
        for one in played
    ]
    reference = FrozenScorer(ModelSettings(path=str(served.folder)), FsdpSettings())
    with trainer(served.folder) as policy:
        ratios = [
            mean_ratio(score(some), played)
            for score in (policy.logprobs, reference.logprobs)
            for some in (played, whole)
        ]
    counts = np.concatenate(
        [np.frombuffer(one.token_mask.counts, np.int32) for one in done if one.token_mask]
    )
    print(
        f"\n{served.kind}, temperature {temperature}, top_p 0.8: {len(counts)} tokens,"
        f" {counts.mean():.1f} kept on average: mean ratio at lag 0 with the kept tokens"
        f" {ratios[0]:.6f}, without {ratios[1]:.3f}"
    )
    assert ratios[0] == pytest.approx(1.0, abs=1e-5)
    assert ratios[2] == pytest.approx(1.0, abs=1e-5), "the reference uses them too"
    assert max(ratios[1], ratios[3]) < 0.95
