"""GRPO (arXiv:2402.03300) from top to bottom in one process, without Ray.

``python -m examples.grpo_in_one_file`` trains for half a minute. With ``rollout.deterministic`` a
distributed run has the same losses and weights bit for bit (a test compares them).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rayloop.chat.rendering import Renderer
from rayloop.chat.tokenizer import load_tokenizer
from rayloop.core.groups import Group, Member
from rayloop.core.protocols import ScoreContext, TrainItem
from rayloop.core.types import (
    Completion,
    EndReason,
    Sampling,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
    derive,
)
from rayloop.data.cursor import TaskCursor
from rayloop.data.dataset import Dataset
from rayloop.engines.generation.decoding import Decoder, DecodeRequest
from rayloop.engines.models import load_model, load_vision
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.optimizer import learning_rate
from rayloop.engines.training.scorer import Scorer, score
from rayloop.envs.episode import summarize
from rayloop.grpo.advantage import CheckedAdvantage, with_advantages
from rayloop.grpo.balance import mini_batches
from rayloop.grpo.batch import TrainSample
from rayloop.grpo.filters import build_filters
from rayloop.grpo.losses.policy import Denominator, PolicyLoss, token_weights
from rayloop.grpo.losses.settings import PpoLoss
from rayloop.grpo.selection import apply_filters, enough, select
from rayloop.grpo.settings import AdvantageSettings, FilteringSettings, UpdateSettings
from rayloop.grpo.staleness import AcceptanceRate
from rayloop.recipes.arc_vision.data import GroundingRows
from rayloop.recipes.arc_vision.reward import IoUReward

FOLDER = Path(__file__).resolve().parents[1] / "recipes/arc_vision"
MODEL = ModelSettings(
    path=str(FOLDER / "loose"), min_pixels=37632, max_pixels=37632, position_tint=0.3
)
ROWS, READER, SAMPLING = (
    FOLDER / "pages/train.parquet",
    GroundingRows.Settings(prompt="{instruction}"),
    Sampling(max_tokens=12),
)
SEED, STEPS, GROUPS, GROUP_SIZE, THREADS = 0, 12, 8, 8, 1
ADVANTAGE, FILTERING, UPDATE, ENGINE = (
    AdvantageSettings(),
    FilteringSettings(),
    UpdateSettings(mini_batches=2),
    FsdpSettings(),
)
LOSS, OPTIMIZER = PpoLoss(clip_high=0.28), OptimizerSettings(lr=3e-4, betas=(0.9, 0.95))


class OneFile:
    """A run: gradients change ``policy``, and ``sampler`` is a copy of it that is renewed after
    each step.
    """

    def __init__(
        self, seed: int = SEED, advantage: CheckedAdvantage | AdvantageSettings = ADVANTAGE
    ) -> None:
        self.seed, self.advantage = seed, advantage
        torch.set_num_threads(THREADS)
        self.policy, self.sampler = load_model(MODEL), load_model(MODEL)
        self.scorer = Scorer(self.policy, ENGINE.logprob_chunk)
        self.collator = Collator(self.policy, MODEL, ENGINE, torch.device("cpu"))
        self.decoder = Decoder(
            self.sampler, load_tokenizer(FOLDER / "loose"), load_vision(MODEL, self.sampler.config)
        )
        self.adamw = torch.optim.AdamW(
            self.policy.parameters(), betas=OPTIMIZER.betas, weight_decay=0, fused=True
        )
        self.renderer, self.reward, self.filters = (
            Renderer(MODEL),
            IoUReward(),
            build_filters(FILTERING.filters),
        )
        self.dataset = Dataset(ROWS, GroundingRows(READER), True, lambda failure: None)
        self.cursor = TaskCursor(len(self.dataset), self.seed)
        self.acceptance = AcceptanceRate(
            4 * GROUPS * GROUP_SIZE, 1 / FILTERING.max_generation_batches
        )
        self.trajectories: dict[TrajectoryId, Trajectory] = {}
        self.step = self.updates = self.group_number = 0

    def steps(self) -> Iterator[tuple[float, float]]:
        """Train without end.

        Yields the mean reward of a step's answers and the mean loss of its updates.
        """
        while True:
            groups = self.collect()
            losses = self.train(
                select(groups, GROUPS * GROUP_SIZE, FILTERING).train
            )  # the groups whose rewards differ most
            self.sampler.load_state_dict(self.policy.state_dict())  # weight sync
            self.decoder.forget()
            self.step += 1
            yield (
                fmean(member.reward for group in groups for member in group.members),
                fmean(losses),
            )

    def collect(self) -> list[Group]:
        """Play groups until enough answers pass the filters.

        Raises GenerationBudgetSpent when the budget does not suffice.
        """
        groups, survivors, target = list[Group](), 0, GROUPS * GROUP_SIZE
        batches, budget = (
            FILTERING.max_generation_batches,
            FILTERING.max_generation_batches * GROUPS,
        )
        while not enough(survivors, target, batches if len(groups) >= budget else 0, FILTERING, {}):
            wanted = math.ceil((target - survivors) / (GROUP_SIZE * self.acceptance.value))
            for _ in range(min(wanted, budget - len(groups))):
                groups.append(
                    apply_filters(
                        with_advantages(self.rollout_group(), self.advantage), self.filters
                    )
                )
                self.acceptance.observe(len(groups[-1].kept), GROUP_SIZE)
            survivors = sum(len(group.kept) for group in groups)
        return groups

    def rollout_group(self) -> Group:
        """Sample a group of answers to the next task, as one batch, and score them."""
        index, self.group_number = self.cursor.next(), self.group_number + 1
        task, visit = self.dataset[index], self.cursor.visits(index)
        shown, sampling = self.renderer.prompt(task.messages), self.renderer.sampling(SAMPLING)
        images = {image.ref.sha256: image.data for image in shown.images if image.data is not None}
        prompt = Turn("prompt", shown.token_ids, tuple(image.ref for image in shown.images))
        answers = dict[int, Any]()

        def row(seed: int) -> DecodeRequest:
            asked = TokenPrompt(shown.token_ids, shown.images, seed=derive(seed, "turn", 0))
            return DecodeRequest(
                asked,
                sampling,
                lambda *answer: answers.update({seed: answer}),
                print,
                lambda: False,
            )

        seeds = [derive(self.seed, task.id, sample, visit) for sample in range(GROUP_SIZE)]
        self.decoder.decode(
            sorted(map(row, seeds), key=lambda one: one.prompt.seed)
        )  # the order of a deterministic run
        members = []
        for sample, seed in enumerate(seeds):
            (token_ids, logprobs, finish, token_mask), id = (
                answers[seed],
                TrajectoryId(self.group_number, sample),
            )
            turns = (
                prompt,
                Completion(token_ids, logprobs, finish, Version(0, self.step), token_mask).turn,
            )
            trajectory = Trajectory(
                id, 0, task.id, seed, turns, sampling, EndReason.DONE, image_bytes=images
            )
            outcome = self.reward.score(
                trajectory, task, ScoreContext(self.step, [self.renderer.decode(token_ids)], 60.0)
            )
            members.append(
                Member(summarize(trajectory, task, 0.0, self.renderer.image_token), outcome)
            )
            self.trajectories[id] = trajectory
        return Group(self.group_number, task, tuple(members))

    def train(self, groups: Sequence[Group]) -> list[float]:
        """One optimizer update per mini-batch. Returns their losses."""
        items = [
            [TrainItem(self.trajectories[m.summary.id], m.advantage or 0.0) for m in group.kept]
            for group in groups
        ]
        plan = mini_batches(
            [len(group) for group in items], UPDATE, self.seed, self.step, GROUPS * GROUP_SIZE
        )
        updates = [
            [self.collator.sample(item) for index in indices for item in items[index]]
            for indices in plan
        ]
        if len(updates) > 1:  # the later ratios are to the policy before the first update
            every = [sample for update in updates for sample in update]
            parts = self.collator.plan(every)
            old_logprobs = iter(score(self.scorer, every, parts, self.collator.ahead(parts)))
            updates = [
                [replace(sample, old_logprobs=next(old_logprobs).logprobs) for sample in update]
                for update in updates
            ]
        self.trajectories.clear()
        return [self.update(update) for update in updates]

    def update(self, samples: Sequence[TrainSample]) -> float:
        """One step of AdamW on the clipped loss over all sampled tokens. Returns the loss."""
        denominator, loss = Denominator(sum(len(s.predict) for s in samples), len(samples)), 0.0
        for batch in self.collator.ahead(self.collator.plan([s for s in samples if s.teaches])):
            logprobs, _ = self.scorer(batch)
            old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            per_token = PolicyLoss(LOSS)(
                logprobs,
                old_logprobs,
                batch.rollout_logprobs,
                batch.advantage,
                batch.trajectory_ids,
            ).loss
            part = (token_weights(batch.trajectory_ids, LOSS, denominator) * per_token).sum()
            part.backward()
            loss += part.item()
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        if (norm := torch.nn.utils.get_total_norm(gradients).item()) > OPTIMIZER.grad_clip:
            torch._foreach_mul_(gradients, OPTIMIZER.grad_clip / norm)
        self.adamw.param_groups[0]["lr"] = learning_rate(OPTIMIZER, self.updates)
        self.adamw.step()
        self.adamw.zero_grad()
        self.updates += 1
        return loss


if __name__ == "__main__":
    for step, (reward, loss) in zip(range(1, STEPS + 1), OneFile().steps(), strict=False):
        print(f"step {step:2}  reward {reward:.3f}  loss {loss:+.4f}", flush=True)
