"""One episode that an agent leads: its chats are answered by the policy, and become the turns of
one trajectory.
"""

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rayloop.chat.openai.answers import Chats
from rayloop.chat.openai.api import ChatRequest, images_of
from rayloop.chat.openai.history import Conversation
from rayloop.chat.rendering import Renderer
from rayloop.core.failures import (
    DataFailure,
    DeadlineExceeded,
    EnvironmentFailed,
    ImageRefused,
    OverLongPrompt,
)
from rayloop.core.threads import in_thread
from rayloop.core.types import (
    Completion,
    EndReason,
    RolloutRequest,
    Sampling,
    TokenPrompt,
    Trajectory,
    Turn,
    derive,
)
from rayloop.envs.settings import EpisodeSettings

Generate = Callable[[TokenPrompt, Sampling], Awaitable[Completion]]
HISTORY = 1 << 30
"""Bytes of an episode's conversations, none of which should be forgotten."""


class Session:
    """What an agent's key opens: its own conversations, until the episode ends.

    Sampling is the run's: a request's ``max_tokens`` may only lower it, its ``stop`` is added, and
    its temperature, ``top_p`` and the like are ignored.
    """

    def __init__(
        self,
        request: RolloutRequest,
        renderer: Renderer,
        settings: EpisodeSettings,
        generate: Generate,
        model: str,
    ) -> None:
        self.chats = Chats(model, renderer, HISTORY)
        self.sampling = renderer.sampling(request.sampling)
        self.reward: float | None = None
        self.limit: EndReason | None = None
        """The limit of the episode at which a request was last refused."""
        self.refused = ""
        """The error that the agent got in place of its last answer; "" when it got one."""
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Gets what makes the episode worthless: an engine's failure, a prompt that is too long."""
        self._request, self._settings, self._generate = request, settings, generate
        self._answered: list[Conversation] = []
        self._rewards: dict[str, float] = {}
        self._seen: Counter[str] = Counter()
        self._asked = 0
        self._running: set[asyncio.Task[dict[str, Any]]] = set()

    @property
    def answered(self) -> bool:
        """Whether the policy has answered."""
        return bool(self._answered)

    def model(self) -> dict[str, Any]:
        """The one entry of ``/v1/models``."""
        return {**self.chats.model(), "max_model_len": self._settings.max_tokens}

    async def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """A chat completion.

        Raises DataFailure and OverLongPrompt for the agent, and the engine's errors.
        """
        task = asyncio.ensure_future(self._chat(asked))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # ``wait`` hides the task's cancellation, so ``close`` does not cancel the request.
        await asyncio.wait({task})
        if task.cancelled():
            raise DataFailure("session", "the episode is over")
        return task.result()

    def pay(self, reward: float, answer: str | None) -> str:
        """Take a reward: of the episode, or of one ``answer`` (``<id>/<choice>``).

        Returns why it is refused, "" when it is not.
        """
        if answer is None:
            if self.reward is not None:
                return f"the episode has its reward already: {self.reward:g}"
            self.reward = reward
        elif answer not in {conversation.name for conversation in self._answered}:
            return f"the answer {answer[:128]!r} was not given in this episode"
        elif answer in self._rewards:
            return f"the answer {answer} has its reward already: {self._rewards[answer]:g}"
        else:
            self._rewards[answer] = reward
        return ""

    def close(self) -> None:
        """Nothing is answered any more."""
        for task in self._running:
            task.cancel()
        self.failed.cancel()

    def trajectory(self, reason: EndReason, result: float | None) -> Trajectory:
        """The episode. Raises EnvironmentFailed when the agent did not ask the policy at all."""
        if not self._answered:
            said = f"; its last request was refused: {self.refused}" if self.refused else ""
            why = (
                f"the agent of task {self._request.task.id} ended without an answer of the"
                f" policy{said}"
            )
            raise EnvironmentFailed(why, bug=True)
        asked, images = self._request, (image for one in self._answered for image in one.images)
        data = {image.ref.sha256: image.data for image in images if image.data is not None}
        turns, order = turns_of(self._answered, self._rewards)
        return Trajectory(
            asked.id,
            asked.attempt,
            asked.task.id,
            asked.seed,
            turns,
            self.sampling,
            reason,
            result,
            data,
            order,
        )

    async def _chat(self, asked: ChatRequest) -> dict[str, Any]:
        s, choices = self._settings, asked.n or 1
        if self._asked + choices > s.max_turns:
            raise self._over(
                EndReason.MAX_TURNS,
                f"an episode has {s.max_turns} answers (environment.episode.max_turns)",
            )
        if (images := images_of(asked.messages)) > s.max_images:
            raise self._over(
                EndReason.MAX_IMAGES,
                f"{images} images, {s.max_images} are allowed (environment.episode.max_images)",
            )
        self._asked += choices  # before anything is awaited, since other requests come meanwhile
        try:
            conversation = await in_thread(self.chats.prompt, asked, timeout=s.step_timeout)
            sampling = self._sampling(asked, self._room(conversation))
        except Exception as error:
            self._asked -= choices
            if self._answered and isinstance(
                error, ImageRefused | DeadlineExceeded
            ):  # of what an answer has led to
                raise self._over(EndReason.ACTION_ERROR, str(error)) from error
            raise

        # The seed depends on what is asked, since an agent's requests may come in any order.
        digest = hashlib.sha256(
            repr((conversation.token_ids, [i.ref.sha256 for i in conversation.images])).encode()
        ).hexdigest()
        seed = derive(self._request.seed, "chat", digest, self._seen[digest])
        self._seen[digest] += 1

        shown, group = (conversation.token_ids, conversation.images), str(self._request.id.group)
        prompts = [
            TokenPrompt(*shown, affinity=group, seed=derive(seed, "choice", index))
            for index in range(choices)
        ]
        try:
            completions = await asyncio.gather(
                *(self._generate(prompt, sampling) for prompt in prompts)
            )
        except Exception as error:
            self._fail(error)
            raise

        answer, known = self.chats.answer(asked, conversation, completions, sampling, seed)
        self._answered += known
        self.refused = ""
        return answer

    def _room(self, conversation: Conversation) -> int:
        """Tokens that are left for the answer. Raises OverLongPrompt."""
        s, tokens = self._settings, len(conversation.token_ids)
        first = min(s.max_prompt_tokens, s.max_tokens - 1)
        if not self._answered and tokens > first:
            self._fail(OverLongPrompt(tokens, first))
            raise OverLongPrompt(tokens, first)
        if tokens >= s.max_tokens:
            self.limit = EndReason.OVER_LENGTH
            raise OverLongPrompt(tokens, s.max_tokens - 1)
        return s.max_tokens - tokens

    def _sampling(self, asked: ChatRequest, room: int) -> Sampling:
        base = self.sampling
        most = min(
            asked.max_completion_tokens or asked.max_tokens or base.max_tokens,
            base.max_tokens,
            room,
        )
        stop = (*base.stop, *(text for text in asked.stops if text not in base.stop))
        return dataclasses.replace(
            base, max_tokens=most, min_tokens=min(base.min_tokens, most), stop=stop
        )

    def _over(self, limit: EndReason, why: str) -> DataFailure:
        self.limit = limit
        return DataFailure(limit, why)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)


def turns_of(
    answered: Sequence[Conversation], rewards: dict[str, float]
) -> tuple[tuple[Turn, ...], tuple[int, ...]]:
    """The turns of all conversations, each sampled one once, and ``Trajectory.order``:
    conversations are ``answered`` in time. One that does not continue the one before it begins with
    a restart: the tokens that it shares with earlier ones are its context.
    """
    continued = {conversation.continues for conversation in answered}
    paid = {id(one.turns[-1]): rewards[one.name] for one in answered if one.name in rewards}
    turns, places = list[Turn](), dict[int, int]()
    for leaf in (one for one in answered if one.name not in continued):
        known = max(
            (number for number, turn in enumerate(leaf.turns, 1) if id(turn) in places), default=0
        )
        if turns:
            before = leaf.turns[:known]
            tokens = tuple(token for turn in before for token in turn.token_ids)
            turns.append(
                Turn(
                    "context",
                    tokens,
                    tuple(image for turn in before for image in turn.images),
                    restart=True,
                )
            )
        for turn in leaf.turns[known:]:
            turns.append(
                dataclasses.replace(turn, reward=paid[id(turn)]) if id(turn) in paid else turn
            )
            if turn.sampled:
                places[id(turn)] = len(places)
    order = tuple(places[id(one.turns[-1])] for one in answered)
    return tuple(turns), () if order == tuple(sorted(order)) else order
