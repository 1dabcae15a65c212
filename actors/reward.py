"""The reward actor, which scores finished episodes. No torch.

It turns a failure of the grader into a number only where ``reward.on_error`` is one.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import chain

from rayloop.actors.base import Actor
from rayloop.actors.failures import fetch
from rayloop.chat.tokenizer import load_tokenizer, shown
from rayloop.config.model import ModelSettings
from rayloop.core.groups import Group, Outcome, Ref, Unscored, UnscoredKind
from rayloop.core.model_files import resolve
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.rewards.scoring import RewardScoring
from rayloop.rewards.settings import RewardSettings
from rayloop.run.records.rollouts import RolloutRecord, rollout_record


class RewardActor(Actor):
    """Scores many trajectories at once.

    Each (or each group) has a thread, or a coroutine when the source is asynchronous.
    """

    def __init__(
        self, model: ModelSettings, settings: RewardSettings, dry_run: bool = False
    ) -> None:
        self._settings = settings
        self._dry_run = dry_run
        self._tokenizer = load_tokenizer(resolve(model.path, model.revision).folder)
        self._scoring = RewardScoring(settings)

    def health(self) -> int:
        """The number of trajectories that are being scored."""
        return self._scoring.running

    async def score(self, task: Task, step: int, *trajectories: Trajectory) -> list[Outcome]:
        """The outcomes of trajectories of one task.

        Each is scored by itself, all at once, or together (``reward.per: group``).
        """
        if self._settings.per == "group":
            return await self.score_together(trajectories, task, step)
        outcomes = await asyncio.gather(
            *(self.score_together([trajectory], task, step) for trajectory in trajectories)
        )
        return [outcome for [outcome] in outcomes]

    async def score_those_left(
        self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int
    ) -> list[Outcome]:
        """Score references to trajectories. Lost trajectories are ``payload_lost``."""
        # ``ray.get`` blocks, and would hold up all other scores of this event loop.
        values, missing = await asyncio.to_thread(fetch, payloads)
        trajectories = [values[payload] for payload in payloads if payload not in missing]
        outcomes = iter(await self.score(task, step, *trajectories))
        reason = "lost with the node that held it, before it was scored"
        payload_lost = Unscored(UnscoredKind.PAYLOAD_LOST, reason)
        return [payload_lost if payload in missing else next(outcomes) for payload in payloads]

    async def score_together(
        self, trajectories: Sequence[Trajectory], task: Task, step: int
    ) -> list[Outcome]:
        """The outcomes of trajectories that are scored together for training step ``step``.

        See ``RewardScoring.score_together``.
        """
        contexts = [self._context(trajectory, step) for trajectory in trajectories]
        return await self._scoring.score_together(trajectories, task, contexts)

    async def describe(
        self, group: Group, *trajectories: Trajectory
    ) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """A record of each member of ``group`` (in order), and the images that travelled with them.

        They are for the run folder.
        """
        images: dict[str, bytes] = {}
        for trajectory in trajectories:
            images.update(trajectory.image_bytes)

        def decode(ids: Sequence[int]) -> str:
            return self._tokenizer.decode(list(ids))

        decode_all = partial(shown, self._tokenizer)
        records = [
            rollout_record(group, member, trajectory, decode, decode_all)
            for member, trajectory in zip(group.members, trajectories, strict=True)
        ]
        return records, images

    def _context(self, trajectory: Trajectory, step: int) -> ScoreContext:
        texts = [self._tokenizer.decode(list(turn.token_ids)) for turn in trajectory.sampled_turns]
        transcript = self._transcript(trajectory)
        return ScoreContext(step, texts, self._settings.timeout, transcript, self._dry_run)

    def _transcript(self, trajectory: Trajectory) -> str | None:
        if not getattr(self._scoring.source, "transcript", False):
            return None
        _prompt, *turns = trajectory.turns
        token_ids = list(chain.from_iterable(turn.token_ids for turn in turns))
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
