"""The episode loop, for one turn or many: environment calls with deadlines, token bookkeeping, end
reasons. Reasons to end are checked in this order: over_length (the token limit cut the turn),
tool_deadline or policy_failure, action_error, done, max_turns, over_length (no room for another
turn), max_images. Sampled tokens are never altered.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from rayloop.chat.rendering import Rendered, Renderer
from rayloop.config.explain import short
from rayloop.core.failures import (
    DataFailure,
    DeadlineExceeded,
    EnvironmentFailed,
    EnvironmentHung,
    ImageRefused,
    InfrastructureFailure,
    OverLongPrompt,
    PolicyFailure,
    ToolDeadline,
)
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.threads import asked, in_thread, settle, start, within
from rayloop.core.types import (
    UNGRADED,
    Completion,
    EndReason,
    FinishReason,
    Message,
    PromptImage,
    RolloutRequest,
    Sampling,
    Summary,
    Task,
    TokenIds,
    TokenPrompt,
    Trajectory,
    Turn,
    derive,
)
from rayloop.data.images import NOT_SHOWN
from rayloop.envs.instance import Instance, Leading
from rayloop.envs.settings import EpisodeSettings
from rayloop.rewards.functions import number

Generate = Callable[[TokenPrompt, Sampling], Awaitable[Completion]]
Result = TypeVar("Result")

CLOSE_TIMEOUT = 60.0
"""Seconds for ``close``; beyond it the environment is left, or killed with its own process.

The episode counts.
"""

logger = logging.getLogger(__name__)


_Shown = tuple[tuple[Message, ...], list[Mapping[str, Any]]]


class FirstPrompts:
    """The prompts of one call. An episode that shows something else is rendered by itself."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._rendered: list[tuple[_Shown, Future[Rendered], threading.Thread]] = []

    async def of(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], timeout: float
    ) -> Rendered:
        """``Renderer.prompt`` in a thread, awaited for at most ``timeout`` seconds.

        Raises as it does, and DeadlineExceeded.
        """
        shown = tuple(messages), list(tools)
        for other, answer, thread in self._rendered:
            if other == shown:
                return await within(timeout, answer, thread)
        answer = asked()
        thread = start(lambda: settle(answer, lambda: self._renderer.prompt(*shown)))
        # Before the await: members of a group come together, and must find this rendering.
        # Before the await: members of a group come together, and must find this rendering.
        self._rendered.append((shown, answer, thread))
        return await within(timeout, answer, thread)


FORGOTTEN = "(this image is no longer shown)"
"""Stands where an image was."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn of the policy, and the observation that followed."""

    sampled: TokenIds
    messages: Sequence[Message]
    rendered: Rendered


def begun_anew(
    renderer: Renderer,
    prompt: Rendered,
    exchanges: Sequence[Exchange],
    sampled: TokenIds,
    room: int,
) -> Rendered | None:
    """The context up to the turn ``sampled`` with at most ``room`` images; None when the prompt's
    alone are more.
    """
    if len(prompt.images) > room:
        return None

    # Half of the room stays free. With none left, the next image would make it begin again.
    left = (room - len(prompt.images)) // 2
    kept = list[Rendered]()
    for exchange in reversed(exchanges):
        left -= len(exchange.rendered.images)
        kept.append(exchange.rendered if left >= 0 else _forgotten(renderer, exchange))
    tokens, images = list(prompt.token_ids), list(prompt.images)
    for exchange, rendered in zip(exchanges, reversed(kept), strict=True):
        tokens += [*exchange.sampled, *rendered.token_ids]
        images += rendered.images
    return Rendered((*tokens, *sampled), tuple(images))


def _forgotten(renderer: Renderer, exchange: Exchange) -> Rendered:
    messages = [_in_words(message, FORGOTTEN) for message in exchange.messages]
    return (
        renderer.observation(messages, exchange.sampled)
        if exchange.rendered.images
        else exchange.rendered
    )


def _in_words(message: Message, words: str) -> Message:
    """The message with ``words`` in the place of each image."""
    return dataclasses.replace(
        message, parts=tuple(part if isinstance(part, str) else words for part in message.parts)
    )


WIDEST = 256
"""Characters of a token, at most: a text of more than so many for each token that an episode may
have is not tokenized.
"""


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(part) for message in messages for part in message.parts if isinstance(part, str))


def _ended(error: PolicyFailure, request: RolloutRequest) -> EndReason:
    """How an episode ends that the policy broke."""
    logger.info("%s: %s", request.id, error)
    return EndReason.TOOL_DEADLINE if isinstance(error, ToolDeadline) else EndReason.POLICY_FAILURE


async def play(
    request: RolloutRequest,
    environment: Instance,
    renderer: Renderer,
    settings: EpisodeSettings,
    generate: Generate,
    prompts: FirstPrompts | None = None,
) -> Trajectory:
    """Make the environment, play one episode and close it, also when cancelled.

    ``prompts`` is shared with others of its call. Raises DataFailure, OverLongPrompt,
    EnvironmentHung, EnvironmentFailed, and whatever ``generate`` raises.
    """
    try:
        if isinstance(environment, Leading):
            from rayloop.envs.led import play_led  # a web server, for the runs that need one

            return await play_led(request, environment, renderer, settings, generate)
        return await _Episode(
            request, environment, renderer, settings, generate, prompts or FirstPrompts(renderer)
        ).run()
    finally:
        try:
            # Whatever came of the episode, an environment that does not close must not change it.
            await environment.close(CLOSE_TIMEOUT)
        except Exception as error:
            logger.warning("closing the environment of %s failed: %s", request.task.id, error)


@dataclass
class _Episode:
    """The state of one episode: its turns so far, and the tokens and images that the policy sees
    now.
    """

    request: RolloutRequest
    environment: Instance
    renderer: Renderer
    settings: EpisodeSettings
    generate: Generate
    prompts: FirstPrompts
    turns: list[Turn] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    images: list[PromptImage] = field(default_factory=list)
    image_bytes: dict[str, bytes] = field(default_factory=dict)
    prompt: Rendered = field(default_factory=lambda: Rendered(()))
    exchanges: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampling = self.renderer.sampling(self.request.sampling)

    async def run(self) -> Trajectory:
        await self._begin()
        reason = None
        while reason is None:
            reason = await self._turn(len([turn for turn in self.turns if turn.sampled]))
        result = None
        if reason not in UNGRADED:
            try:
                result = await self._evaluate()
            except PolicyFailure as error:
                reason = _ended(error, self.request)
        asked, turns = self.request, tuple(self.turns)
        return Trajectory(
            asked.id,
            asked.attempt,
            asked.task.id,
            asked.seed,
            turns,
            self.sampling,
            reason,
            result,
            self.image_bytes,
        )

    async def _evaluate(self) -> float | None:
        result = await self._call("evaluate", timeout=self.settings.step_timeout)
        if result is not None and not isinstance(result, Real | np.bool_):
            raise self._wrong("evaluate", "return a number or None", result)
        return None if result is None else float(result)

    async def _begin(self) -> None:
        began, settings = time.time(), self.settings
        await self._blamed("__init__", self.environment.make(settings.step_timeout))

        first: Observation = await self._call(
            "reset", self.request.task, timeout=settings.step_timeout
        )
        self._check("reset", "return Observation", first)
        tools = await self._call("tools", timeout=settings.step_timeout) or list(
            self.request.task.tools
        )
        rendered = await self.prompts.of(first.messages, tools, settings.step_timeout)

        limit = min(settings.max_prompt_tokens, settings.max_tokens - 1)
        if len(rendered.token_ids) > limit:
            raise OverLongPrompt(len(rendered.token_ids), limit)
        if len(rendered.images) > settings.max_images:
            reason = (
                f"the prompt has {len(rendered.images)} images, max_images is {settings.max_images}"
            )
            raise DataFailure(self.request.task.id, reason)

        self.prompt = rendered
        self._append("prompt", rendered, times=(began, time.time()))

    async def _turn(self, index: int) -> EndReason | None:
        """Sample one turn and let the environment answer it.

        Returns why the episode ends, None when it goes on.
        """
        room = self._room()
        completion = await self._sample(index, room)
        # Only where the episode's limit cut the turn: one that reached its own limit is answered.
        if completion.finish is FinishReason.LENGTH and room <= self.sampling.max_tokens:
            return EndReason.OVER_LENGTH

        try:
            step: StepResult = await self._call(
                "step", self._text(completion), timeout=self.settings.step_timeout
            )
        except PolicyFailure as error:
            return _ended(error, self.request)
        times = (*completion.times, time.time()) if completion.times else ()
        if not isinstance(step, StepResult):
            raise self._wrong("step", "return StepResult", step)
        if step.observation is not None:
            self._check(
                "step", "return StepResult with observation Observation or None", step.observation
            )

        goes_on = step.error is not None or not (step.done or step.observation is None)
        executed = step.error is None if goes_on else None
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], executed=executed, reward=self._reward(step.reward), times=times
        )

        if step.error is not None and (step.done or self.settings.on_error == "end"):
            return EndReason.ACTION_ERROR
        if step.done or step.observation is None:
            return EndReason.DONE
        if index + 1 >= self.settings.max_turns:
            return EndReason.MAX_TURNS
        return await self._observe(step.observation.messages, completion)

    def _reward(self, found: Any) -> float:
        """Raises EnvironmentFailed when that is no finite number."""
        reward = number(found) if isinstance(found, Real | np.bool_) else None
        if reward is None:
            what = f"{self.environment.name}.step of task {self.request.task.id}"
            shown = short(found, 200)
            raise EnvironmentFailed(
                f"{what} returned StepResult with reward {shown}, which must be a finite number",
                bug=True,
            )
        return reward

    async def _sample(self, index: int, room: int) -> Completion:
        prompt = TokenPrompt(
            tuple(self.token_ids),
            tuple(self.images),
            affinity=str(self.request.id.group),
            seed=derive(self.request.seed, "turn", index),
        )
        most = min(self.sampling.max_tokens, room)
        sampling = dataclasses.replace(
            self.sampling, max_tokens=most, min_tokens=min(self.sampling.min_tokens, most)
        )
        completion = await self.generate(prompt, sampling)
        self.turns.append(completion.turn)
        self.token_ids += completion.token_ids
        return completion

    async def _observe(
        self, messages: Sequence[Message], completion: Completion
    ) -> EndReason | None:
        """Append an observation if it fits.

        What the action made too large, or unusable, is never the engine's or the environment's
        failure: it ends the episode.
        """
        # Both checks come before the work of the renderer, which grows with what the action made.
        if sum(len(message.images) for message in messages) > self.settings.max_images:
            return EndReason.MAX_IMAGES
        if _characters(messages) > self.settings.max_tokens * WIDEST:
            return EndReason.OVER_LENGTH
        if self.renderer.image_token is None:
            messages = [_in_words(message, NOT_SHOWN) for message in messages]
        try:
            rendered = await in_thread(
                self.renderer.observation,
                messages,
                completion.token_ids,
                timeout=self.settings.step_timeout,
            )
            full = len(self.images) + len(rendered.images) > self.settings.max_images
            anew = (
                await self._anew(completion, rendered)
                if full and self.settings.when_full == "forget"
                else None
            )
        except ImageRefused as error:
            logger.info("%s: the environment's image is refused: %s", self.request.id, error)
            return EndReason.ACTION_ERROR
        except DataFailure as error:
            task = self.request.task.id
            raise EnvironmentFailed(
                f"the environment of task {task} returned a broken image: {error}"
            ) from error
        except DeadlineExceeded as error:
            return _ended(
                ToolDeadline(f"what the action gave could not be shown: {error}"), self.request
            )
        if len(rendered.token_ids) >= self._room(anew):
            return EndReason.OVER_LENGTH
        if full and anew is None:
            return EndReason.MAX_IMAGES
        if anew is not None:
            self.token_ids, self.images = [], []
            self._append("context", anew, restart=True)
        self._append(messages[-1].role if messages else "user", rendered)
        self.exchanges.append(Exchange(completion.token_ids, messages, rendered))
        return None

    def _room(self, anew: Rendered | None = None) -> int:
        """Tokens that the episode may still have, in the context ``anew`` if there is one."""
        room = self.settings.max_tokens - len(self.token_ids if anew is None else anew.token_ids)
        if (most := self.settings.max_response_tokens) is None:
            return room
        return min(
            room, most - sum(len(turn.token_ids) for turn in self.turns[1:] if not turn.restart)
        )

    async def _anew(self, completion: Completion, observation: Rendered) -> Rendered | None:
        """The context up to ``completion`` with room for the images of ``observation``."""
        room = self.settings.max_images - len(observation.images)
        return await in_thread(
            begun_anew,
            self.renderer,
            self.prompt,
            self.exchanges,
            completion.token_ids,
            room,
            timeout=self.settings.step_timeout,
        )

    def _append(
        self, role: str, rendered: Rendered, *, restart: bool = False, times: tuple[float, ...] = ()
    ) -> None:
        images = tuple(image.ref for image in rendered.images)
        self.turns.append(Turn(role, rendered.token_ids, images, restart=restart, times=times))
        self.token_ids += rendered.token_ids
        self.images += rendered.images
        self.image_bytes |= {
            image.ref.sha256: image.data for image in rendered.images if image.data is not None
        }

    def _text(self, completion: Completion) -> str:
        """The turn's text for the environment: cut behind the first stop string.

        The tokens are not.
        """
        text = self.renderer.decode(completion.token_ids)
        if completion.finish is not FinishReason.STOP_STRING:
            return text
        ends = [text.index(stop) + len(stop) for stop in self.sampling.stop if stop in text]
        return text[: min(ends, default=len(text))]

    async def _call(self, method: str, *args: object, timeout: float) -> Any:
        return await self._blamed(method, self.environment.call(method, *args, timeout=timeout))

    async def _blamed(self, method: str, call: Awaitable[Result]) -> Result:
        """What a call returns.

        Its errors count as infrastructure, unless they blame the data or the action.
        """
        what = f"{self.environment.name}.{method} of task {self.request.task.id}"
        try:
            return await call
        except DeadlineExceeded as error:
            raise EnvironmentHung(f"{what} gave {error}", self.environment.contained) from error
        except DataFailure:
            raise
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"{what}: {error}", error.bug) from error
        except Exception as error:
            # Only these two run after an action: before it, nothing can be the policy's doing.
            if isinstance(error, PolicyFailure) and method in ("step", "evaluate"):
                raise
            bug = not isinstance(error, OSError | MemoryError | InfrastructureFailure)
            raise EnvironmentFailed(
                f"{what} raised {type(error).__name__}: {error}", bug
            ) from error

    def _check(self, method: str, rule: str, found: Any) -> None:
        """Raises EnvironmentFailed when that is no Observation of messages."""
        if not isinstance(found, Observation):
            raise self._wrong(method, rule, found)
        for message in found.messages:
            if not isinstance(message, Message):
                raise self._wrong(method, "give Observation a tuple of Message", message)

    def _wrong(self, method: str, rule: str, found: Any) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"{self.environment.name}.{method} must {rule}, not {type(found).__name__}", bug=True
        )


def summarize(
    trajectory: Trajectory, task: Task, seconds: float, image_token: int | None
) -> Summary:
    """The driver's summary of a trajectory that took ``seconds``.

    ``image_token`` is ``Renderer.image_token``.
    """
    sampled, shown = (
        trajectory.sampled_turns,
        [turn for turn in trajectory.turns if not turn.restart],
    )
    lengths = [len(turn.token_ids) for turn in trajectory.turns]
    first = next(i for i, turn in enumerate(trajectory.turns) if turn.sampled)
    image_tokens = (
        sum(turn.token_ids.count(image_token) for turn in trajectory.turns)
        if image_token is not None
        else 0
    )
    versions = [turn.version for turn in sampled if turn.version is not None]
    return Summary(
        trajectory.id,
        trajectory.attempt,
        trajectory.task_id,
        task.source,
        trajectory.end_reason,
        length=sum(lengths),
        sampled_tokens=sum(len(turn.token_ids) for turn in sampled),
        turns=len(sampled),
        images=sum(len(turn.images) for turn in shown),
        observation_images=sum(len(turn.images) for turn in shown[first:]),
        images_consistent=image_tokens == sum(image.tokens for image in trajectory.images),
        first_version=min(versions),
        last_version=max(versions),
        env_result=trajectory.env_result,
        seconds=seconds,
        prompt_tokens=sum(lengths[:first]),
        cut=any(turn.finish is FinishReason.LENGTH for turn in sampled),
        turn_rewards=tuple(turn.reward for turn in sampled),
        states=trajectory.states,
        order=trajectory.order,
        spans=tuple(
            (name, *pair)
            for turn in trajectory.turns
            for name, pair in zip(
                ("generate", "step") if turn.sampled else ("reset",),
                pairwise(turn.times),
                strict=False,
            )
        ),
    )
