"""Whether each entry of the menu of losses, advantages, corrections and KL terms learns: a table
with intervals over seeds.

    python -m benchmarks.evidence menu      continues benchmarks/evidence/menu.json and prints the
    table

Each entry trains the policy of examples/grpo_in_one_file.py to point at elements of web pages,
STEPS steps of 8 groups of 8 answers and two updates, at its paper's defaults, with the trainer of a
run (``FsdpEngine``) in one process. Before and after, the policy answers the held-out pages:
greedily, and sampled as in training.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from pydantic import TypeAdapter

from benchmarks.evidence.costs import T_975
from benchmarks.evidence.runs import write
from examples import grpo_in_one_file as one_file
from rayloop.core.groups import Credit, Group, Scored
from rayloop.core.protocols import ScoreContext, TrainItem
from rayloop.core.types import Sampling, TokenPrompt, Version, derive
from rayloop.data.dataset import Dataset
from rayloop.engines.generation.decoding import DecodeRequest
from rayloop.engines.models import hf_state
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.grpo.advantage import build_advantage, over_step
from rayloop.grpo.balance import mini_batches
from rayloop.grpo.losses.settings import LossChoice, LossSettings
from rayloop.grpo.settings import AdvantageChoice
from rayloop.recipes.arc_vision.data import GroundingRows

RESULT = Path(__file__).with_suffix(".json")
STEPS, SEEDS = 10, 3
DECIMAL_PLACES = 6
"""Decimals that are kept. The table rounds means of them to three."""
PPO = {"clip_high": 0.28}
ENTRIES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "ppo, grpo": (PPO, {}),
    "gspo": ({"kind": "gspo"}, {}),
    "cispo": ({"kind": "cispo"}, {}),
    "sapo": ({"kind": "sapo"}, {}),
    "dppo": ({"kind": "dppo"}, {}),
    "dppo 0.2": ({"kind": "dppo", "clip_low": 0.2, "clip_high": 0.2}, {}),
    "reinforce": ({"kind": "reinforce"}, {}),
    "seq-mean-token-mean": ({**PPO, "aggregation": "seq-mean-token-mean"}, {}),
    "constant 12 x 32": ({**PPO, "aggregation": 384.0}, {"kind": "dr_grpo"}),
    "prompt-mean": ({**PPO, "aggregation": "prompt-mean"}, {}),
    "k3 0.01": ({**PPO, "kl_coef": 0.01, "kl": "k3"}, {}),
    "k2 0.01": ({**PPO, "kl_coef": 0.01, "kl": "k2"}, {}),
    "k3+ 0.01": ({**PPO, "kl_coef": 0.01, "kl": "k3+"}, {}),
    "unbiased k3 0.01": ({**PPO, "kl_coef": 0.01, "kl": {"estimator": "k3", "unbiased": True}}, {}),
    "k1 in the reward 0.01": (
        {**PPO, "kl_coef": 0.01, "kl": {"estimator": "k1", "in": "reward"}},
        {},
    ),
    "adaptive kl": (
        {**PPO, "kl": "k3+", "kl_coef": {"start": 0.01, "target": 0.05, "horizon": 1000}},
        {},
    ),
    "adaptive entropy": ({**PPO, "entropy_coef": {"target": 0.5}}, {}),
    "top_entropy_quantile 0.2": ({**PPO, "top_entropy_quantile": 0.2}, {}),
    "token, mask": ({**PPO, "correction": {"action": "mask", "low": 0.5, "high": 5}}, {}),
    "sequence, mask": (
        {**PPO, "correction": {"level": "sequence", "action": "mask", "high": 3}},
        {},
    ),
    "geometric, mask": (
        {**PPO, "correction": {"level": "geometric", "action": "mask", "low": 0.99, "high": 1.01}},
        {},
    ),
    "off_policy 0.1": ({**PPO, "correction": {"off_policy": 0.1, "veto": [1e-4, 100]}}, {}),
    "dr_grpo": (PPO, {"kind": "dr_grpo"}),
    "rloo": (PPO, {"kind": "rloo"}),
    "reinforce_pp": (PPO, {"kind": "reinforce_pp"}),
    "batch_std": (PPO, {"kind": "batch_std"}),
    "batch_std of rewards": (PPO, {"kind": "batch_std", "with": {"of": "rewards"}}),
    "gdpo": (PPO, {"kind": "gdpo", "with": {"weights": {"iou": 1.0, "click": 1.0}}}),
    "maxrl": (PPO, {"kind": "maxrl"}),
    "turns": (PPO, {"kind": "turns"}),
    "gigpo": (PPO, {"kind": "gigpo"}),
    "permuted (control)": (PPO, {"kind": "permuted"}),
}
"""Name -> ``policy.loss`` and ``algorithm.advantage``."""


BEFORE: dict[int, dict[str, float]] = {}
"""Seed -> the answers of the start weights, which all entries have."""


class Trained(one_file.OneFile):
    """examples/grpo_in_one_file.py with any loss and advantage."""

    def __init__(
        self, seed: int, loss: LossSettings, advantage: AdvantageChoice, meeting: str
    ) -> None:
        self.credit = build_advantage(advantage)
        super().__init__(seed, self.credit)
        made = {"rank": 0, "world_size": 1, "seed": seed}
        model, engine = one_file.MODEL, one_file.ENGINE
        self.engine = FsdpEngine(
            model, engine, one_file.OPTIMIZER, loss, init_method=meeting, **made
        )
        self.start = FsdpEngine(model, engine, one_file.OPTIMIZER, loss, init_method=None, **made)
        self.reports = list[dict[str, float]]()

    def train(self, groups: Sequence[Group]) -> list[float]:
        """One optimizer update per mini-batch, by the trainer of a run."""
        groups = over_step(groups, self.credit)
        kept = [
            [(m.credit or Credit(0.0), self.trajectories[m.summary.id]) for m in group.kept]
            for group in groups
        ]
        every = [trajectory for group in kept for _, trajectory in group]
        reference = dict(zip(map(id, every), self.start.logprobs(every), strict=True))
        items = [
            [
                TrainItem(
                    t,
                    c.advantage,
                    reference[id(t)],
                    turns=c.turns,
                    streams=c.streams,
                    group_tokens=tokens,
                )
                for c, t in group
            ]
            for group in kept
            for tokens in (sum(len(turn.token_ids) for _, t in group for turn in t.sampled_turns),)
        ]
        sizes = [len(group) for group in items]
        plan = mini_batches(
            sizes, one_file.UPDATE, self.seed, self.step, one_file.GROUPS * one_file.GROUP_SIZE
        )
        self.reports.append(
            self.engine.train(
                [[item for index in update for item in items[index]] for update in plan]
            )
        )
        self.trajectories.clear()
        own = hf_state(self.policy)
        for name, weights in self.engine.export(Version(0, self.step)).items():
            own[name].copy_(weights)
        return [self.reports[-1]["actor/loss"]]

    def held_out(self, temperature: float) -> float:
        """The mean IoU of one answer to each held-out page."""
        rows = Dataset(
            one_file.FOLDER / "pages/val.parquet",
            GroundingRows(one_file.READER),
            True,
            lambda failure: None,
        )
        scores = dict[int, float]()
        for first in range(0, len(rows), 52):
            self.decoder.decode(
                [
                    self._ask(rows, i, temperature, scores)
                    for i in range(first, min(first + 52, len(rows)))
                ]
            )
        return fmean(scores.values())

    def _ask(
        self, rows: Dataset, index: int, temperature: float, scores: dict[int, float]
    ) -> DecodeRequest:
        task = rows[index]
        shown, sampling = (
            self.renderer.prompt(task.messages),
            Sampling(temperature=temperature, max_tokens=12),
        )

        def finish(token_ids: Sequence[int], *_: Any) -> None:
            text = self.renderer.decode(tuple(token_ids))
            outcome = self.reward.score(None, task, ScoreContext(0, [text], 60.0))  # type: ignore[arg-type]  # reads the text
            scores[index] = outcome.value if isinstance(outcome, Scored) else 0.0

        asked = TokenPrompt(
            shown.token_ids, shown.images, seed=derive(self.seed, "held-out", index)
        )
        return DecodeRequest(asked, self.renderer.sampling(sampling), finish, print, lambda: False)


def run(name: str, seed: int) -> dict[str, float]:
    """Train one entry. Returns what the table is made of."""
    loss: LossSettings = TypeAdapter(LossChoice).validate_python(ENTRIES[name][0])
    advantage = AdvantageChoice.model_validate(ENTRIES[name][1])
    began, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        one = Trained(seed, loss, advantage, f"file://{folder}/meet")
        if seed not in BEFORE:
            BEFORE[seed] = {"greedy_before": one.held_out(0.0), "sampled_before": one.held_out(1.0)}
        rewards = [reward for (reward, _), _ in zip(one.steps(), range(STEPS), strict=False)]
        after = {"greedy_after": one.held_out(0.0), "sampled_after": one.held_out(1.0)}
        one.engine.close()
    clips = [
        sum(report.get(f"actor/clip_{side}", 0.0) for side in ("low", "high"))
        for report in one.reports
    ]
    first, last = one.reports[:3], one.reports[-3:]
    means = {
        **BEFORE[seed],
        **after,
        "reward_first": fmean(rewards[:3]),
        "reward_last": fmean(rewards[-3:]),
        "clipped": fmean(clips),
        "entropy_first": fmean(r["actor/entropy"] for r in first),
        "entropy_last": fmean(r["actor/entropy"] for r in last),
        "kl_last": fmean(r["actor/kl"] for r in last),
        "bounded": fmean(r["actor/capped"] for r in one.reports),
    }
    return {
        **{column: round(value, DECIMAL_PLACES) for column, value in means.items()},
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


BASE = "ppo, grpo"
"""The entry that the others change."""
RESULTS = ("sampled_after", "greedy_after", "reward_last")
"""Of answers, not of log-probs: a weight that is 1 up to rounding changes no answer."""


def did_nothing(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Entries with the results of ``BASE`` in each seed: they are no evidence that what they name
    can be trained with.
    """

    def results(name: str) -> dict[str, list[float]]:
        return {seed: [row[column] for column in RESULTS] for seed, row in found[name].items()}

    return [name for name in found if name != BASE and results(name) == results(BASE)]


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown: means over seeds, gains with t intervals, of the entries that did something."""
    lines = [
        "|entry|held-out before|after|gain|entropy|KL|clipped|",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seeds in found.items():
        if name in did_nothing(found):
            continue
        rows = list(seeds.values())

        def mean(column: str, rows: list[Mapping[str, float]] = rows) -> float:
            return fmean(row[column] for row in rows)

        gains = [row["sampled_after"] - row["sampled_before"] for row in rows]
        half = (
            T_975[len(gains) - 1] * stdev(gains) / math.sqrt(len(gains))
            if len(gains) > 1
            else math.nan
        )
        cells = [
            f"{mean('sampled_before'):.3f}",
            f"{mean('sampled_after'):.3f}",
            f"{fmean(gains):+.3f} ± {half:.3f}",
            f"{mean('entropy_first'):.2f} to {mean('entropy_last'):.2f}",
            f"{mean('kl_last'):.3f}",
            f"{mean('clipped'):.3f}",
        ]
        lines.append(f"|{name}|{'|'.join(cells)}|")
    return "\n".join(lines)


def main(argv: Sequence[str] = ()) -> None:
    """Run what menu.json lacks, a line for each run, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence menu")
    parser.add_argument(
        "--only", nargs="*", choices=ENTRIES, default=list(ENTRIES), metavar="ENTRY"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=RESULT)
    chosen = parser.parse_args(argv)
    found: dict[str, Any] = json.loads(chosen.out.read_text("utf-8")) if chosen.out.exists() else {}
    for seed in range(chosen.seeds):
        for name in chosen.only:
            if str(seed) not in found.setdefault(name, {}):
                found[name][str(seed)] = run(name, seed)
                print(seed, name, json.dumps(found[name][str(seed)]), flush=True)
                write(chosen.out, found, levels=2)
    print(table(found))
    print("did nothing:", ", ".join(did_nothing(found)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
