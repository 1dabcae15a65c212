"""One episode that an agent drives.

The policy answers its chats, which become the turns of one trajectory.
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
from rayloop.envs.history.contexts import context_turn
from rayloop.envs.settings import EpisodeSettings

Generate = Callable[[TokenPrompt, Sampling], Awaitable[Completion]]
HISTORY_BYTES = 1 << 30
"""Bytes of an episode's conversations, so many that none is forgotten."""


class Session:
    """The episode that an agent's key opens, with its conversations.

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
        self.chats = Chats(model, renderer, HISTORY_BYTES)
        self.sampling = renderer.sampling(request.sampling)
        self.reward: float | None = None
        self.limit: EndReason | None = None
        """The limit of the episode at which a request was last refused."""
        self.refused = ""
        """The error that the agent got in place of its last answer; "" when it got one."""
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Gets an error that makes the episode worthless.

        It is an engine's failure, or a prompt that is too long.
        """
        self._request = request
        self._settings = settings
        self._generate = generate
        self._answered: list[Conversation] = []
        self._rewards: dict[str, float] = {}
        self._seed_uses: Counter[str] = Counter()
        self._answer_count = 0
        self._running: set[asyncio.Task[dict[str, Any]]] = set()

    @property
    def answered(self) -> bool:
        """Return whether the policy has answered."""
        return bool(self._answered)

    def model(self) -> dict[str, Any]:
        """Return the one entry of ``/v1/models``."""
        return {**self.chats.model(), "max_model_len": self._settings.max_tokens}

    async def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """Return a chat completion.

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
        """Cancel all requests, and answer no further one."""
        for task in self._running:
            task.cancel()
        self.failed.cancel()

    def trajectory(self, reason: EndReason, result: float | None) -> Trajectory:
        """Return the episode. Raises EnvironmentFailed when the agent never asked the policy."""
        request = self._request
        if not self._answered:
            refusal = ""
            if self.refused:
                refusal = f"; its last request was refused: {self.refused}"
            raise EnvironmentFailed(
                f"the agent of task {request.task.id} ended without an answer of the"
                f" policy{refusal}",
                bug=True,
            )
        image_bytes = {}
        for conversation in self._answered:
            for image in conversation.images:
                if image.data is not None:
                    image_bytes[image.ref.sha256] = image.data
        turns, order = turns_of(self._answered, self._rewards)
        return Trajectory(
            request.id,
            request.attempt,
            request.task.id,
            request.seed,
            turns,
            self.sampling,
            reason,
            result,
            image_bytes,
            order,
        )

    async def _chat(self, request: ChatRequest) -> dict[str, Any]:
        settings = self._settings
        choices = request.n or 1
        self._check_limits(request, choices)
        # Counted before anything is awaited, since other requests may come in between.
        self._answer_count += choices
        try:
            conversation = await in_thread(
                self.chats.prompt, request, timeout=settings.step_timeout
            )
            sampling = self._sampling(request, self._room(conversation))
        except Exception as error:
            self._answer_count -= choices
            # After an answer, the images and texts are what that answer has led to.
            if self._answered and isinstance(error, ImageRefused | DeadlineExceeded):
                raise self._over(EndReason.ACTION_ERROR, str(error)) from error
            raise

        seed = self._seed(conversation)
        prompts = [
            TokenPrompt(
                conversation.token_ids,
                conversation.images,
                affinity=str(self._request.id.group),
                seed=derive(seed, "choice", index),
            )
            for index in range(choices)
        ]
        try:
            completions = await asyncio.gather(
                *(self._generate(prompt, sampling) for prompt in prompts)
            )
        except Exception as error:
            self._fail(error)
            raise

        answer, conversations = self.chats.answer(
            request, conversation, completions, sampling, seed
        )
        self._answered += conversations
        self.refused = ""
        return answer

    def _check_limits(self, request: ChatRequest, choices: int) -> None:
        """Raises DataFailure for more answers or images than an episode may have."""
        settings = self._settings
        if self._answer_count + choices > settings.max_turns:
            raise self._over(
                EndReason.MAX_TURNS,
                f"an episode has {settings.max_turns} answers (environment.episode.max_turns)",
            )
        images = images_of(request.messages)
        if images > settings.max_images:
            raise self._over(
                EndReason.MAX_IMAGES,
                f"{images} images, {settings.max_images} are allowed"
                " (environment.episode.max_images)",
            )

    def _seed(self, conversation: Conversation) -> int:
        """Return a seed that depends on the prompt: an agent's requests may come in any order."""
        images = [image.ref.sha256 for image in conversation.images]
        digest = hashlib.sha256(repr((conversation.token_ids, images)).encode()).hexdigest()
        seed = derive(self._request.seed, "chat", digest, self._seed_uses[digest])
        self._seed_uses[digest] += 1
        return seed

    def _room(self, conversation: Conversation) -> int:
        """Return the tokens that are left for the answer. Raises OverLongPrompt."""
        settings = self._settings
        tokens = len(conversation.token_ids)
        prompt_limit = min(settings.max_prompt_tokens, settings.max_tokens - 1)
        if not self._answered and tokens > prompt_limit:
            self._fail(OverLongPrompt(tokens, prompt_limit))
            raise OverLongPrompt(tokens, prompt_limit)
        if tokens >= settings.max_tokens:
            self.limit = EndReason.OVER_LENGTH
            raise OverLongPrompt(tokens, settings.max_tokens - 1)
        return settings.max_tokens - tokens

    def _sampling(self, request: ChatRequest, room: int) -> Sampling:
        base = self.sampling
        requested = request.max_completion_tokens or request.max_tokens or base.max_tokens
        max_tokens = min(requested, base.max_tokens, room)
        added_stops = [text for text in request.stops if text not in base.stop]
        return dataclasses.replace(
            base,
            max_tokens=max_tokens,
            min_tokens=min(base.min_tokens, max_tokens),
            stop=(*base.stop, *added_stops),
        )

    def _over(self, limit: EndReason, reason: str) -> DataFailure:
        self.limit = limit
        return DataFailure(limit, reason)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)


def turns_of(
    answered: Sequence[Conversation], rewards: dict[str, float]
) -> tuple[tuple[Turn, ...], tuple[int, ...]]:
    """Return the turns of all conversations, each sampled one once, and ``Trajectory.order``.

    Conversations are ``answered`` in time. One that does not continue the one before it begins with
    a restart: the tokens that it shares with earlier ones are its context.
    """
    continued = {conversation.continues for conversation in answered}
    turn_rewards = {}
    for conversation in answered:
        if conversation.name in rewards:
            turn_rewards[id(conversation.turns[-1])] = rewards[conversation.name]
    turns = list[Turn]()
    places = dict[int, int]()
    for leaf in answered:
        if leaf.name in continued:
            continue
        shared = 0
        for count, turn in enumerate(leaf.turns, 1):
            if id(turn) in places:
                shared = count
        if turns:
            turns.append(context_turn(leaf.turns[:shared]))
        for turn in leaf.turns[shared:]:
            has_reward = id(turn) in turn_rewards
            turns.append(
                dataclasses.replace(turn, reward=turn_rewards[id(turn)]) if has_reward else turn
            )
            if turn.sampled:
                places[id(turn)] = len(places)
    order = tuple(places[id(conversation.turns[-1])] for conversation in answered)
    return tuple(turns), () if order == tuple(sorted(order)) else order
