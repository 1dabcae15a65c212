"""The losses of an update, written from their papers on rows of their own, one trajectory each, in
plain loops over tokens. Nothing of the product is imported. A log-prob is a scalar tensor in
float64, so that autograd gives the gradient. ``update`` takes the keys of ``policy.loss`` as a
configuration has them (``kl_term`` for ``kl``), with the papers' defaults.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Row = list[Tensor]
"""A value for each token of one trajectory."""


@dataclass(frozen=True)
class One:
    """A trajectory. ``rl``, ``ref_kl`` and ``ce`` are its weights in the three streams."""

    logprobs: Row
    old_logprobs: Row
    rollout_logprobs: Row
    ref_logprobs: Row
    entropy: Row
    masked_logprobs: Row
    """NaN where no picture precedes."""
    advantages: list[float]
    group: int = 0
    rl: float = 1.0
    ref_kl: float = 1.0
    ce: float = 0.0


# Surrogates ---------------------------------------------------------------------------------------


def _clipped(r: Tensor, a: float, low: float, high: float) -> Tensor:
    return -torch.minimum(r * a, torch.clip(r, 1 - low, 1 + high) * a)


def ppo(
    logprobs: Row,
    old_logprobs: Row,
    advantages: Sequence[float],
    low: float,
    high: float,
    dual: float | None,
) -> Row:
    """arXiv:1707.06347, equation 7, with the ceiling of arXiv:1912.09729, equation 5."""
    losses = []
    for c, o, a in zip(logprobs, old_logprobs, advantages, strict=True):
        loss = _clipped(torch.exp(c - o), a, low, high)
        losses.append(
            torch.minimum(loss, torch.tensor(-dual * a, dtype=loss.dtype))
            if dual is not None and a < 0
            else loss
        )
    return losses


def gspo(logprobs: Row, old_logprobs: Row, advantage: float, low: float, high: float) -> Tensor:
    """arXiv:2507.18071, equations 5 and 7: the loss of a whole trajectory."""
    s = torch.exp(
        sum((c - o for c, o in zip(logprobs, old_logprobs, strict=True)), torch.tensor(0.0))
        / len(logprobs)
    )
    return _clipped(s, advantage, low, high)


def gspo_token(
    logprobs: Row, old_logprobs: Row, advantages: Sequence[float], low: float, high: float
) -> Row:
    """arXiv:2507.18071, equation 14: the trajectory's ratio, without gradient, times each token's
    own over itself.
    """
    s = math.exp(
        sum(float((c - o).detach()) for c, o in zip(logprobs, old_logprobs, strict=True))
        / len(logprobs)
    )
    return [
        _clipped(s * torch.exp(c - c.detach()), a, low, high)
        for c, a in zip(logprobs, advantages, strict=True)
    ]


def cispo(
    logprobs: Row, old_logprobs: Row, advantages: Sequence[float], low: float, high: float
) -> Row:
    """arXiv:2506.13585, equations 4 and 5."""
    ratios = [
        min(max(float((c - o).detach().exp()), 1 - low), 1 + high)
        for c, o in zip(logprobs, old_logprobs, strict=True)
    ]
    return [-r * a * c for r, a, c in zip(ratios, advantages, logprobs, strict=True)]


def sapo(
    logprobs: Row, old_logprobs: Row, advantages: Sequence[float], positive: float, negative: float
) -> Row:
    """arXiv:2511.20347, equations 5 and 6."""
    losses = []
    for c, o, a in zip(logprobs, old_logprobs, advantages, strict=True):
        tau = positive if a > 0 else negative
        losses.append(-(4 / tau) / (1 + torch.exp(-tau * (torch.exp(c - o) - 1))) * a)
    return losses


def dppo(
    logprobs: Row, old_logprobs: Row, advantages: Sequence[float], low: float, high: float
) -> Row:
    """arXiv:2602.04879 with the binary total variation, in the form of verl and prime-rl."""
    losses = []
    for c, b, a in zip(logprobs, old_logprobs, advantages, strict=True):
        change = float((c.exp() - b.exp()).detach())
        left_out = change > high if a > 0 else change < -low
        losses.append(0 * c if left_out else -a * min(float((c - b).detach().exp()), 20.0) * c)
    return losses


def reinforce(logprobs: Row, old_logprobs: Row, advantages: Sequence[float]) -> Row:
    return [-a * c for c, a in zip(logprobs, advantages, strict=True)]


SURROGATES: dict[str, tuple[Callable[..., Row], dict[str, Any]]] = {
    "ppo": (ppo, {"low": 0.2, "high": 0.2, "dual": 3.0}),
    "gspo": (gspo_token, {"low": 3e-4, "high": 4e-4}),
    "cispo": (cispo, {"low": 1.0, "high": 4.0}),
    "sapo": (sapo, {"positive": 1.0, "negative": 1.05}),
    "dppo": (dppo, {"low": 0.15, "high": 0.15}),
    "reinforce": (reinforce, {}),
}
"""Each kind's formula and its paper's numbers."""
KEYS = {"clip_low": "low", "clip_high": "high", "dual_clip": "dual"}
OVER_TRAJECTORIES = ("gspo", "sapo")
"""Kinds whose papers average over the trajectories' means."""


# The gap between engine and trainer ---------------------------------------------------------------


def weights(
    one: One,
    level: str = "token",
    action: str = "truncate",
    low: float = 0.0,
    high: float = 2.0,
    veto: Sequence[float] | None = None,
    off_policy: float | None = None,
    bypass: bool = False,
) -> list[float]:
    """Truncated importance sampling (arXiv:1802.01561), IcePop (a mask on tokens), their forms over
    trajectories, the veto on outliers, and the mask of DeepSeek-V3.2 (arXiv:2512.02556, equation
    9). With ``bypass`` the ratio has the gap already.
    """
    gaps = [float(o - b) for o, b in zip(one.old_logprobs, one.rollout_logprobs, strict=True)]
    n = len(gaps)
    match level:
        case "token":
            ratios = [math.exp(gap) for gap in gaps]
        case "sequence":
            ratios = [math.exp(sum(gaps))] * n
        case _:
            ratios = [math.exp(sum(gaps) / n)] * n
    if action == "truncate":
        found = [min(max(r, low), high) for r in ratios]
    else:
        found = [(1.0 if bypass else r) if low <= r <= high else 0.0 for r in ratios]
    vetoed = veto is not None and any(not veto[0] <= math.exp(gap) <= veto[1] for gap in gaps)
    moved = (
        sum(
            float((b - c).detach()) for b, c in zip(one.rollout_logprobs, one.logprobs, strict=True)
        )
        / n
    )
    dropped = off_policy is not None and sum(one.advantages) < 0 and moved > off_policy
    return [0.0] * n if vetoed or dropped else found


# KL to the reference (joschu.net/blog/kl-approx.html) ---------------------------------------------


def kl(c: Tensor, f: Tensor, estimator: str) -> Tensor:
    """Of one token.

    From 10 nats below the reference on, k3 costs what it costs there and pulls as there;
    ``low_var_kl`` stops at 10, and its pull with it.
    """
    d = c - f
    k2, k3 = d * d / 2, torch.exp(-d) + d - 1
    if estimator == "low_var_kl":
        return torch.minimum(k3, torch.tensor(10.0, dtype=d.dtype))
    if d < -10:
        k3 = math.exp(10) - 11 + (1 - math.exp(10)) * (c - c.detach())
    return {"k1": d, "k2": k2, "k3": k3, "k3+": k2 + (k3 - k2).detach()}[estimator]


def returns_to_go(values: Sequence[float]) -> list[float]:
    """A reward of each token counts for it and all before it (arXiv:1909.08593)."""
    return [sum(values[t:]) for t in range(len(values))]


def bound_of_top(entropy: Sequence[float], share: float) -> float:
    """arXiv:2506.01939, equation 5: the entropy from which a token of the batch is of the ``share``
    with the most, rounded up.
    """
    return sorted(entropy, reverse=True)[math.ceil(share * len(entropy)) - 1]


# Perception (arXiv:2507.06448) -------------------------------------------------------------------


def perception(c: Tensor, masked: Tensor, entropy: Tensor, coef: float, eta: float) -> Tensor:
    """The term of one token: minus gamma times the KL to the policy that sees masked pictures, plus eta times
    the entropy. The KL is estimated from the sampled token as in the authors' script, at most 10; the
    masked policy is a constant, and so is its own entropy, which is left out.
    """
    if math.isnan(float(masked)):
        return eta * entropy
    ratio = torch.exp(masked.detach() - c)
    divergence = torch.clip(ratio - torch.log(ratio) - 1, max=10.0)
    return eta * entropy - coef * divergence


# Aggregation --------------------------------------------------------------------------------------


def aggregate(
    rows: Sequence[Row], how: str | float, groups: Sequence[int], of_stream: Sequence[float]
) -> Tensor:
    """One number of a stream of an update, from the losses of all its tokens.

    A trajectory whose weight in the stream is 0 is not in its denominator; under prompt-mean a
    group then weighs as much as the share of its tokens that is in the stream.
    """
    whole = defaultdict[int, int](int)
    for row, group in zip(rows, groups, strict=True):
        whole[group] += len(row)
    here = [
        (torch.stack(row).sum() * w, len(row), g)
        for row, g, w in zip(rows, groups, of_stream, strict=True)
        if w != 0
    ]
    if not here:
        return torch.tensor(0.0, dtype=torch.float64)
    match how:
        case "token-mean":
            return sum(s for s, _, _ in here) / sum(n for _, n, _ in here)
        case "seq-mean-token-sum":
            return sum(s for s, _, _ in here) / len(here)
        case "seq-mean-token-mean":
            return sum(s / n for s, n, _ in here) / len(here)
        case "prompt-mean":
            return sum(s / whole[g] for s, _, g in here) / sum(n / whole[g] for _, n, g in here)
    return sum(s for s, _, _ in here) / float(how)


# All of it ----------------------------------------------------------------------------------------


def _rule(correction: str | Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, bool]:
    """The arguments of ``weights``, and whether the ratio is to the engine's log-probs."""
    if isinstance(correction, str):
        return ({} if correction == "decoupled" else None), correction == "bypass"
    return correction, bool(correction.get("bypass", False))


def update(
    rows: Sequence[One],
    *,
    kind: str = "ppo",
    aggregation: str | float | None = None,
    kl_coef: float = 0.0,
    kl_term: str | Mapping[str, Any] = "k3",
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    perception_term: Mapping[str, float] | None = None,
    correction: str | Mapping[str, Any] | None = None,
    **own: Any,
) -> Tensor:
    """The loss of an update: the three streams, each over its own denominator."""
    term: Mapping[str, Any] = {"estimator": kl_term} if isinstance(kl_term, str) else kl_term
    estimator = term.get("estimator", "k3")
    formula, numbers = SURROGATES[kind]
    numbers = numbers | {KEYS[key]: value for key, value in own.items()}
    rule, bypass = _rule(correction or ("bypass" if kind == "dppo" else "decoupled"))
    how = aggregation or ("seq-mean-token-mean" if kind in OVER_TRAJECTORIES else "token-mean")
    streams: dict[str, list[Row]] = {"rl": [], "ref_kl": [], "ce": []}
    bound = bound_of_top(
        [float(h.detach()) for one in rows if one.rl for h in one.entropy], top_entropy_quantile
    )
    for one in rows:
        given = one
        if kl_coef and term.get("in") == "reward":
            given = with_kl_reward(one, kl_coef, estimator)
        w = [1.0] * len(one.logprobs) if rule is None else weights(given, **rule)
        losses = formula(
            one.logprobs,
            one.rollout_logprobs if bypass else one.old_logprobs,
            given.advantages,
            **numbers,
        )
        chosen = [float(h.detach()) >= bound for h in one.entropy]
        streams["rl"].append(
            [
                x * loss * inside - entropy_coef * h
                for x, loss, inside, h in zip(w, losses, chosen, one.entropy, strict=True)
            ]
        )
        if perception_term is not None:
            terms = [
                perception(c, m, h, perception_term["coef"], perception_term["entropy"])
                for c, m, h in zip(one.logprobs, one.masked_logprobs, one.entropy, strict=True)
            ]
            streams["rl"][-1] = [a + b for a, b in zip(streams["rl"][-1], terms, strict=True)]
        ratios = (
            [torch.exp(c - b) for c, b in zip(one.logprobs, one.rollout_logprobs, strict=True)]
            if term.get("unbiased")
            else w
        )
        if kl_coef and term.get("in") != "reward":
            costs = [
                kl(c, f, estimator) for c, f in zip(one.logprobs, one.ref_logprobs, strict=True)
            ]
            streams["ref_kl"].append(
                [x * kl_coef * cost for x, cost in zip(ratios, costs, strict=True)]
            )
        streams["ce"].append([-c for c in one.logprobs])
    if not streams["ref_kl"]:
        del streams["ref_kl"]
    groups = [one.group for one in rows]
    return sum(
        aggregate(losses, how, groups, [getattr(one, name) for one in rows])
        for name, losses in streams.items()
    )


def with_kl_reward(one: One, coef: float, estimator: str) -> One:
    """Minus ``coef`` times the estimate at the old policy is a reward of each token."""
    costs = [
        coef * float(kl(o, f, estimator))
        for o, f in zip(one.old_logprobs, one.ref_logprobs, strict=True)
    ]
    advantages = [a - cost for a, cost in zip(one.advantages, returns_to_go(costs), strict=True)]
    return One(**{**vars(one), "advantages": advantages})


# Coefficients that change from step to step -------------------------------------------------------


def adaptive_kl(
    start: float, target: float, horizon: float, steps: Sequence[tuple[float, int]]
) -> float:
    """arXiv:1909.08593, equation 4, after ``steps`` of (KL, trajectories)."""
    for measured, n in steps:
        start *= 1 + max(-0.2, min(0.2, (measured - target) / target)) * n / horizon
    return start


def adaptive_entropy(start: float, target: float, step: float, steps: Sequence[float]) -> float:
    """Skywork-OR1 (arXiv:2505.22312, section 4.2), after ``steps`` of entropies, not below 0: what
    applies to the next step.
    """
    applied = 0.0
    for measured in steps:
        start = max(0.0, start + (step if measured < target else -step))
        applied = start if measured <= target else 0.0
    return applied
