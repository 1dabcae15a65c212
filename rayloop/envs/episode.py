"""The episode loop, for one turn or many: calls with deadlines, token bookkeeping, end reasons.

Reasons to end are checked in this order: over_length (the token limit cut the turn), tool_deadline
or policy_failure, action_error, done, max_turns, over_length (no room for another turn),
max_images. Sampled tokens are never altered.
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
    cause_of,
    raised,
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
    TokenPrompt,
    Trajectory,
    Turn,
    derive,
)
from rayloop.data.images import NOT_SHOWN
from rayloop.envs.history.contexts import Contexts, images_replaced
from rayloop.envs.history.past import Past
from rayloop.envs.history.policies import FULL, EpisodeHistory
from rayloop.envs.instance import AgentDriven, Instance
from rayloop.envs.settings import EpisodeSettings
from rayloop.grpo.balance import repeated_tokens
from rayloop.rewards.functions import number

Generate = Callable[[TokenPrompt, Sampling], Awaitable[Completion]]
Result = TypeVar("Result")

CLOSE_TIMEOUT_S = 60.0
"""Seconds for ``close``; beyond it the environment is left, or killed with its own process.

The episode counts.
"""

logger = logging.getLogger(__name__)

_First = tuple[tuple[Message, ...], list[Mapping[str, Any]]]
"""The first messages of an episode, and its tools."""


class FirstPrompts:
    """The prompts of one call. An episode that shows something else is rendered by itself."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._rendered: list[tuple[_First, Future[Rendered], threading.Thread]] = []

    async def of(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], timeout: float
    ) -> Rendered:
        """``Renderer.prompt`` in a thread, awaited for at most ``timeout`` seconds.

        Raises as it does, and DeadlineExceeded.
        """
        first = (tuple(messages), list(tools))
        for earlier, answer, thread in self._rendered:
            if earlier == first:
                return await within(timeout, answer, thread)
        answer = asked()
        thread = start(lambda: settle(answer, lambda: self._renderer.prompt(*first)))
        # Before the await: members of a group come together, and must find this rendering.
        self._rendered.append((first, answer, thread))
        return await within(timeout, answer, thread)


MAX_TOKEN_CHARACTERS = 256
"""Characters that one token can have at most.

A text with more than this for each token that an episode may have is not tokenized.
"""


def _text_length(messages: Sequence[Message]) -> int:
    """Return the characters of all texts."""
    texts = [part for message in messages for part in message.parts if isinstance(part, str)]
    return sum(map(len, texts))


def _ended(error: PolicyFailure, request: RolloutRequest) -> EndReason:
    """Return the end reason of an episode that the policy broke."""
    logger.info("%s: %s", request.id, error)
    if isinstance(error, ToolDeadline):
        return EndReason.TOOL_DEADLINE
    return EndReason.POLICY_FAILURE


async def run_episode(
    request: RolloutRequest,
    environment: Instance,
    renderer: Renderer,
    settings: EpisodeSettings,
    generate: Generate,
    prompts: FirstPrompts | None = None,
    history: EpisodeHistory = FULL,
) -> Trajectory:
    """Make the environment, play one episode and close it, also when cancelled.

    ``prompts`` is shared with others of its call; an agent decides itself what the policy sees, and
    has no ``history``. Raises DataFailure, OverLongPrompt,
    EnvironmentHung, EnvironmentFailed, and whatever ``generate`` raises.
    """
    try:
        if isinstance(environment, AgentDriven):
            from rayloop.envs.agent_episode import (
                run_agent_episode,  # a web server, for the runs that need one
            )

            return await run_agent_episode(request, environment, renderer, settings, generate)
        prompts = prompts or FirstPrompts(renderer)
        contexts = Contexts(renderer, history.policy, history.language)
        episode = _Episode(request, environment, renderer, settings, generate, prompts, contexts)
        return await episode.run()
    finally:
        try:
            # An environment that does not close must not change the episode's result.
            await environment.close(CLOSE_TIMEOUT_S)
        except Exception as error:
            logger.warning("closing the environment of %s failed: %s", request.task.id, error)


@dataclass
class _Episode:
    """The state of one episode: its turns, and the tokens and images that the policy sees now."""

    request: RolloutRequest
    environment: Instance
    renderer: Renderer
    settings: EpisodeSettings
    generate: Generate
    prompts: FirstPrompts
    contexts: Contexts
    turns: list[Turn] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    images: list[PromptImage] = field(default_factory=list)
    image_bytes: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sampling = self.renderer.sampling(self.request.sampling)

    async def run(self) -> Trajectory:
        await self._begin()
        reason = None
        while reason is None:
            index = sum(1 for turn in self.turns if turn.sampled)
            reason = await self._turn(index)
        result = None
        if reason not in UNGRADED:
            try:
                result = await self._evaluate()
            except PolicyFailure as error:
                reason = _ended(error, self.request)
        return Trajectory(
            self.request.id,
            self.request.attempt,
            self.request.task.id,
            self.request.seed,
            tuple(self.turns),
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
        start_time = time.time()
        settings = self.settings
        await self._blamed("__init__", self.environment.make(settings.step_timeout))

        task = self.request.task
        first: Observation = await self._call("reset", task, timeout=settings.step_timeout)
        self._check("reset", "return Observation", first)
        tools = await self._call("tools", timeout=settings.step_timeout) or list(task.tools)
        past = Past(first.messages, task_images=tuple(task.images))
        messages = self.contexts.begin(past, tools)
        rendered = await self.prompts.of(messages, tools, settings.step_timeout)

        limit = min(settings.max_prompt_tokens, settings.max_tokens - 1)
        if len(rendered.token_ids) > limit:
            raise OverLongPrompt(len(rendered.token_ids), limit)
        if len(rendered.images) > settings.max_images:
            reason = (
                f"the prompt has {len(rendered.images)} images, max_images is {settings.max_images}"
            )
            raise DataFailure(task.id, reason)

        self._append("prompt", rendered, times=(start_time, time.time()))
        self._keep_words(first.messages)

    async def _turn(self, index: int) -> EndReason | None:
        """Sample one turn and let the environment answer it.

        Returns the reason why the episode ends, None when it continues.
        """
        room = self._room()
        completion = await self._sample(index, room)
        # The episode ends only if its own limit cut the turn. A turn that reached the limit of a
        # turn is answered.
        if completion.finish is FinishReason.LENGTH and room <= self.sampling.max_tokens:
            return EndReason.OVER_LENGTH

        text = self._text(completion)
        try:
            step: StepResult = await self._call("step", text, timeout=self.settings.step_timeout)
        except PolicyFailure as error:
            return _ended(error, self.request)
        times = (*completion.times, time.time()) if completion.times else ()
        if not isinstance(step, StepResult):
            raise self._wrong("step", "return StepResult", step)
        if step.observation is not None:
            self._check(
                "step", "return StepResult with observation Observation or None", step.observation
            )

        # An action that failed, and one that the environment answers, leave room for another turn.
        awaits_turn = step.error is not None or not (step.done or step.observation is None)
        executed = step.error is None if awaits_turn else None
        reward = self._reward(step.reward)
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], executed=executed, reward=reward, times=times
        )

        if step.error is not None and (step.done or self.settings.on_error == "end"):
            return EndReason.ACTION_ERROR
        if step.done or step.observation is None:
            return EndReason.DONE
        if index + 1 >= self.settings.max_turns:
            return EndReason.MAX_TURNS
        return await self._observe(step.observation.messages, completion, text)

    def _reward(self, value: Any) -> float:
        """Return a step's reward. Raises EnvironmentFailed when it is not a finite number."""
        reward = number(value) if isinstance(value, Real | np.bool_) else None
        if reward is None:
            call = f"{self.environment.name}.step of task {self.request.task.id}"
            raise EnvironmentFailed(
                f"{call} returned StepResult with reward {short(value, 200)}, which must be a"
                " finite number",
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
        base = self.sampling
        max_tokens = min(base.max_tokens, room)
        min_tokens = min(base.min_tokens, max_tokens)
        sampling = dataclasses.replace(base, max_tokens=max_tokens, min_tokens=min_tokens)
        completion = await self.generate(prompt, sampling)
        self.turns.append(completion.turn)
        self.token_ids += completion.token_ids
        return completion

    async def _observe(
        self, messages: Sequence[Message], completion: Completion, text: str
    ) -> EndReason | None:
        """Append an observation if it fits.

        An action may lead to an observation that is too large, or that the renderer refuses. That
        ends the episode, and never counts as a failure of the engine or the environment.
        """
        settings = self.settings
        # Both checks come before the work of the renderer, which grows with what the action made.
        if sum(len(message.images) for message in messages) > settings.max_images:
            return EndReason.MAX_IMAGES
        if _text_length(messages) > settings.max_tokens * MAX_TOKEN_CHARACTERS:
            return EndReason.OVER_LENGTH
        if self.renderer.image_token is None:
            messages = [images_replaced(message, NOT_SHOWN) for message in messages]
        try:
            following = await in_thread(
                self.contexts.after,
                text,
                completion.token_ids,
                messages,
                timeout=settings.step_timeout,
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
            late = ToolDeadline(f"what the action gave could not be shown: {error}")
            return _ended(late, self.request)
        observation, context, alone = following
        if len(observation.token_ids) >= self._room(context):
            return EndReason.OVER_LENGTH
        earlier_images = self.images if context is None else context.images
        if len(earlier_images) + len(observation.images) > settings.max_images:
            return EndReason.MAX_IMAGES
        if context is not None:
            self.token_ids = []
            self.images = []
            self._append("context", context, restart=True)
        self._append(messages[-1].role if messages else "user", observation)
        if alone is not None:
            by_itself = (alone.token_ids, alone.refs)
            self.turns[-1] = dataclasses.replace(self.turns[-1], alone=by_itself)
        self._keep_words(messages)
        return None

    def _room(self, context: Rendered | None = None) -> int:
        """Return the tokens that the episode may still have, in a new ``context`` if given."""
        token_ids = self.token_ids if context is None else context.token_ids
        room = self.settings.max_tokens - len(token_ids)
        response_limit = self.settings.max_response_tokens
        if response_limit is None:
            return room
        responses = [turn for turn in self.turns[1:] if not turn.restart]
        return min(room, response_limit - sum(len(turn.token_ids) for turn in responses))

    def _append(
        self, role: str, rendered: Rendered, *, restart: bool = False, times: tuple[float, ...] = ()
    ) -> None:
        images = rendered.refs
        self.turns.append(Turn(role, rendered.token_ids, images, restart=restart, times=times))
        self.token_ids += rendered.token_ids
        self.images += rendered.images
        self.image_bytes |= {
            image.ref.sha256: image.data for image in rendered.images if image.data is not None
        }

    def _keep_words(self, messages: Sequence[Message]) -> None:
        """Keep the texts that the last turn renders, for its record."""
        said = []
        for message in messages:
            texts = (part if isinstance(part, str) else None for part in message.parts)
            said.append((message.role, tuple(texts)))
        self.turns[-1] = dataclasses.replace(self.turns[-1], said=tuple(said))

    def _text(self, completion: Completion) -> str:
        """Return the turn's text for the environment, cut behind the first stop string.

        The tokens are not cut.
        """
        text = self.renderer.decode(completion.token_ids)
        if completion.finish is not FinishReason.STOP_STRING:
            return text
        ends = [text.index(stop) + len(stop) for stop in self.sampling.stop if stop in text]
        return text[: min(ends, default=len(text))]

    async def _call(self, method: str, *args: object, timeout: float) -> Any:
        return await self._blamed(method, self.environment.call(method, *args, timeout=timeout))

    async def _blamed(self, method: str, call: Awaitable[Result]) -> Result:
        """Return what a call returns.

        Its errors count as infrastructure, unless they blame the data or the action.
        """
        where = f"{self.environment.name}.{method} of task {self.request.task.id}"
        try:
            return await call
        except DeadlineExceeded as error:
            raise EnvironmentHung(f"{where} gave {error}", self.environment.contained) from error
        except DataFailure:
            raise
        except EnvironmentFailed as error:
            why = f"{where}: {error}"
            raise EnvironmentFailed(why, error.bug, error.cause, error.server) from error
        except Exception as error:
            # Only these two run after an action: errors before it are never the policy's.
            if isinstance(error, PolicyFailure) and method in ("step", "evaluate"):
                raise
            bug = not isinstance(error, OSError | MemoryError | InfrastructureFailure)
            cause = None if bug else cause_of(raised(error))
            raise EnvironmentFailed(
                f"{where} raised {type(error).__name__}: {error}", bug, cause
            ) from error

    def _check(self, method: str, rule: str, value: Any) -> None:
        """Raises EnvironmentFailed when the value is not an Observation of messages."""
        if not isinstance(value, Observation):
            raise self._wrong(method, rule, value)
        for message in value.messages:
            if not isinstance(message, Message):
                raise self._wrong(method, "give Observation a tuple of Message", message)

    def _wrong(self, method: str, rule: str, value: Any) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"{self.environment.name}.{method} must {rule}, not {type(value).__name__}", bug=True
        )


def summarize(
    trajectory: Trajectory, task: Task, seconds: float, image_token: int | None
) -> Summary:
    """Return the driver's summary of a trajectory that took ``seconds``.

    ``image_token`` is ``Renderer.image_token``.
    """
    sampled = trajectory.sampled_turns
    once = [turn for turn in trajectory.turns if not turn.restart]
    lengths = [len(turn.token_ids) for turn in trajectory.turns]
    first_sampled = next(i for i, turn in enumerate(trajectory.turns) if turn.sampled)
    image_tokens = 0
    if image_token is not None:
        image_tokens = sum(turn.token_ids.count(image_token) for turn in trajectory.turns)
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
        images=sum(len(turn.images) for turn in once),
        observation_images=sum(len(turn.images) for turn in once[first_sampled:]),
        images_consistent=image_tokens == sum(image.tokens for image in trajectory.images),
        first_version=min(versions),
        last_version=max(versions),
        env_result=trajectory.env_result,
        seconds=seconds,
        prompt_tokens=sum(lengths[:first_sampled]),
        repeated_tokens=repeated_tokens(trajectory, image_token),
        cut=any(turn.finish is FinishReason.LENGTH for turn in sampled),
        turn_rewards=tuple(turn.reward for turn in sampled),
        states=trajectory.states,
        actions=trajectory.actions,
        order=trajectory.order,
        spans=_spans(trajectory),
    )


def _spans(trajectory: Trajectory) -> tuple[tuple[str, float, float], ...]:
    """Return name, start and end of what the turns' times bound."""
    spans = list[tuple[str, float, float]]()
    for turn in trajectory.turns:
        names = ("generate", "step") if turn.sampled else ("reset",)
        for name, (start_time, end_time) in zip(names, pairwise(turn.times), strict=False):
            spans.append((name, start_time, end_time))
    return tuple(spans)
