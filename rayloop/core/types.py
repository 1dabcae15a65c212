"""The types of tasks and trajectories.

No torch, no ray, no I/O. A trajectory is a sequence of turns: *sampled* turns carry rollout
log-probs, all others are context. Token ids are the expanded ones (n per image).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rayloop.core.token_mask import MAX_TOP_K, TokenMask

TokenIds = tuple[int, ...]


class EndReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    OVER_LENGTH = "over_length"
    MAX_IMAGES = "max_images"
    ACTION_ERROR = "action_error"
    TOOL_DEADLINE = "tool_deadline"
    POLICY_FAILURE = "policy_failure"
    ENVIRONMENT_FAILURE = "environment_failure"


UNGRADED = (EndReason.TOOL_DEADLINE, EndReason.POLICY_FAILURE)
"""Ends that the policy broke: the failing value, without asking environment or grader."""


class FinishReason(StrEnum):
    """Why an engine stopped sampling one turn."""

    END_TOKEN = "end_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Weights of one optimizer step.

    The lineage grows at every restore, so a version never names two sets of weights.
    """

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where an image comes from: a file under the data root, or encoded bytes (PNG, JPEG, WebP).

    ``size``: width and height of bytes that have been decoded already, and are not decoded again
    for a prompt.
    """

    path: str | None = None
    data: bytes | None = None
    size: tuple[int, int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image in a token sequence, by content.

    It has ``tokens`` image tokens; ``grid`` is (t, h, w) in patches after the resize. Its bytes are
    at ``path``; with None, in ``Trajectory.image_bytes[sha256]``.
    """

    sha256: str
    width: int
    height: int
    grid: tuple[int, int, int]
    tokens: int
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; ``parts`` are texts and images in reading order.

    ``fields``: its other keys that a chat template may read (``tool_calls``, ``tool_call_id``,
    ``name``, ``reasoning_content``); ``content``, whose value is None, stands for the parts.
    """

    role: str
    parts: tuple[str | ImageSource, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> list[ImageSource]:
        """The images among its parts."""
        return [part for part in self.parts if isinstance(part, ImageSource)]


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row.

    ``source`` names the data source (metrics are split by it); ``extra`` is passed through.
    ``environment``: the kind to play it in; empty: that of the run. ``tools``: schemas in OpenAI's
    form that the chat template shows where the environment has no tools itself. ``bare``: the
    messages only say what to do, and a screen puts the language's prompt around them.
    """

    id: str
    messages: tuple[Message, ...]
    ground_truth: Any = None
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    bare: bool = False

    @property
    def images(self) -> list[ImageSource]:
        """The images that its messages show, in reading order."""
        return list(chain.from_iterable(message.images for message in self.messages))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The policy samples ``log_softmax(mask(logits) / temperature)`` (docs/algorithm.md, 1).

    The mask removes ``banned_tokens``, and ``end_tokens`` from a turn's first ``min_tokens``; of
    the others it keeps the ``top_k`` likeliest (``MAX_TOP_K`` when only ``top_p`` is given), and of
    these the fewest likeliest whose probabilities, at the temperature, reach ``top_p``.
    ``temperature`` 0: greedy, log-probs at 1, nothing else is removed.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    end_tokens: TokenIds = ()
    banned_tokens: TokenIds = ()
    top_p: float = 1.0
    top_k: int | None = None

    @property
    def effective_top_k(self) -> int | None:
        """The ``top_k`` that applies. None: ``top_p`` and ``top_k`` remove nothing."""
        truncates = self.temperature > 0 and (self.top_p < 1 or self.top_k is not None)
        return (self.top_k or MAX_TOP_K) if truncates else None


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt with its bytes, or None when the engine can read ``ref.path`` itself."""

    ref: ImageRef
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Cohort:
    """Requests that must be decoded as one batch (``rollout.deterministic``).

    The engine waits for ``size`` requests with the same ``key``.
    """

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Expanded token ids and their images, in order.

    ``affinity`` groups requests that share a prefix.
    """

    token_ids: TokenIds
    images: tuple[PromptImage, ...] = ()
    affinity: str = ""
    seed: int = 0
    cohort: Cohort | None = None


@dataclass(frozen=True, slots=True)
class ImagesSent:
    """Images that went to engines with requests.

    ``bytes`` is their size; ``again`` is the number of images that an engine had forgotten.
    """

    images: int = 0
    bytes: int = 0
    again: int = 0

    def __add__(self, other: "ImagesSent") -> "ImagesSent":
        return ImagesSent(
            self.images + other.images, self.bytes + other.bytes, self.again + other.again
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn, with the version of the weights that sampled it.

    ``token_ids`` [N]; ``logprobs`` [N] (natural log, of the sampled token); ``token_mask`` [N] with
    a ``Sampling`` that keeps some tokens only. ``times``: when it was requested and when it
    arrived, unix seconds.
    """

    token_ids: TokenIds
    logprobs: tuple[float, ...]
    finish: FinishReason
    version: Version
    token_mask: TokenMask | None = None
    times: tuple[float, ...] = field(default=(), compare=False)

    @property
    def turn(self) -> "Turn":
        """The completion as the policy's turn in an episode."""
        return Turn(
            "assistant",
            self.token_ids,
            logprobs=self.logprobs,
            version=self.version,
            finish=self.finish,
            token_mask=self.token_mask,
            times=self.times,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of tokens: sampled by the policy (``logprobs`` set) or context.

    ``restart``: the policy no longer sees what comes before it. ``executed``: whether the
    environment carried out a sampled turn's action; None: unknown, or an answer. ``reward``: of a
    sampled turn (``StepResult.reward``). ``times``: the completion's, then when the environment had
    answered; for a prompt, of its rendering. ``alone``: an observation as it would follow its
    answer, in a context that shows it otherwise. ``said``: roles and texts of what it renders, None
    for an image.
    """

    role: str
    token_ids: TokenIds
    images: tuple[ImageRef, ...] = ()
    logprobs: tuple[float, ...] | None = None
    version: Version | None = None
    finish: FinishReason | None = None
    restart: bool = False
    executed: bool | None = None
    reward: float = 0.0
    token_mask: TokenMask | None = None
    times: tuple[float, ...] = field(default=(), compare=False)
    alone: tuple[TokenIds, tuple[ImageRef, ...]] | None = None
    said: tuple[tuple[str, tuple[str | None, ...]], ...] = field(default=(), compare=False)

    @property
    def sampled(self) -> bool:
        """Whether the policy wrote this turn."""
        return self.logprobs is not None


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """``group`` is the group's group number, ``sample`` the index in the group.

    Re-issues keep the id (see ``attempt``).
    """

    group: int
    sample: int

    def __str__(self) -> str:
        return f"{self.group}/{self.sample}"


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One episode to play: what the driver sends to an environment actor.

    ``cohort`` is the group's size in deterministic mode; ``episode`` has values that override
    ``environment.episode``.
    """

    task: Task
    id: TrajectoryId
    attempt: int
    seed: int
    sampling: Sampling
    cohort: int | None = None
    episode: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Streams:
    """The weights that a trajectory's tokens have in the losses that an update sums.

    The losses are the policy gradient (``rl``), the KL to the reference (``ref_kl``, which
    regularises or distils) and the supervised loss (``ce``). Each is averaged over the tokens with
    a weight other than 0.
    """

    rl: float = 1.0
    ref_kl: float = 1.0
    ce: float = 0.0


STREAMS = Streams()
"""The policy gradient, and the KL where the loss has one."""


@dataclass(frozen=True, slots=True)
class FlatTrajectory:
    """A trajectory as arrays of length T.

    token_ids int64; loss_mask bool, True = sampled by the policy; rollout_logprobs float32, 0
    where not sampled; turn_position int32, index within the sampled turn, -1 elsewhere.
    ``token_mask`` belongs to the sampled tokens; None when some turn has none.
    """

    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    rollout_logprobs: npt.NDArray[np.float32]
    turn_position: npt.NDArray[np.int32]
    token_mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode, as the trainer needs it (the *payload*).

    Travels between actors; the driver never opens it.
    """

    id: TrajectoryId
    attempt: int
    task_id: str
    seed: int
    turns: tuple[Turn, ...]
    sampling: Sampling
    end_reason: EndReason
    env_result: float | None = None
    image_bytes: Mapping[str, bytes] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    """The places of the sampled turns in the order of time; empty: the order of ``turns``."""

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The images of all turns, in their order."""
        return tuple(chain.from_iterable(turn.images for turn in self.turns))

    @property
    def sampled_turns(self) -> tuple[Turn, ...]:
        """The turns that the policy wrote."""
        return tuple(turn for turn in self.turns if turn.sampled)

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy wrote."""
        return sum(len(turn.token_ids) for turn in self.sampled_turns)

    @property
    def segments(self) -> tuple[Self, ...]:
        """The parts between restarts, in order; each is trained as one sequence of tokens.

        The context of a restart repeats earlier tokens; each sampled token is trained once.
        """
        restarts = [place for place, turn in enumerate(self.turns) if place and turn.restart]
        if not restarts:
            return (self,)
        bounds = pairwise([0, *restarts, len(self.turns)])
        return tuple(replace(self, turns=self.turns[start:end]) for start, end in bounds)

    @property
    def states(self) -> tuple[str, ...]:
        """The anchor state (GiGPO, arXiv:2505.10978) of each sampled turn.

        It is 16 hex digits of BLAKE2b over the images and tokens after the previous sampled turn
        (the prompt's for the first). A restart's context and a first end token are skipped.
        """
        states: list[str] = []
        images: list[str] = []
        tokens: list[int] = []
        for turn in self.turns:
            if turn.sampled:
                states.append(_short_hash((images, tokens)).hex())
                images = []
                tokens = []
            elif not turn.restart:
                # Whether a turn was cut or ended with its end token does not change the state.
                token_ids, turn_images = turn.alone or (turn.token_ids, turn.images)
                begins_with_end = token_ids and token_ids[0] in self.sampling.end_tokens
                skipped = 1 if begins_with_end and not tokens else 0
                tokens += token_ids[skipped:]
                images += [image.sha256 for image in turn_images]
        return tuple(states)

    @property
    def actions(self) -> tuple[str, ...]:
        """For each sampled turn 16 hex digits of BLAKE2b over its tokens."""
        return tuple(_short_hash(turn.token_ids).hex() for turn in self.sampled_turns)

    def flatten(self) -> FlatTrajectory:
        """Concatenate the turns of one segment.

        Raises ValueError when log-probs and sampled tokens differ in number.
        """
        total = sum(len(turn.token_ids) for turn in self.turns)
        parts = [turn.token_mask for turn in self.sampled_turns]
        flat = FlatTrajectory(
            np.empty(total, np.int64),
            np.zeros(total, np.bool_),
            np.zeros(total, np.float32),
            np.full(total, -1, np.int32),
            TokenMask.joined(filter(None, parts)) if parts and all(parts) else None,
        )
        start = 0
        for turn in self.turns:
            size = len(turn.token_ids)
            part = slice(start, start + size)
            start += size
            flat.token_ids[part] = turn.token_ids
            if turn.logprobs is not None:
                if len(turn.logprobs) != size:
                    raise ValueError(
                        f"trajectory {self.id}: {len(turn.logprobs)} log-probs for {size} sampled"
                        " tokens"
                    )
                flat.loss_mask[part] = True
                flat.rollout_logprobs[part] = turn.logprobs
                flat.turn_position[part] = np.arange(size)
        return flat


@dataclass(frozen=True, slots=True)
class Summary:
    """The facts about a trajectory that the driver has without opening its payload.

    Lengths in tokens (expanded). ``turn_rewards``, ``states`` and ``actions`` (``Turn.reward``,
    ``Trajectory.states``, a hash of the sampled tokens) have one entry for each sampled turn, in
    the order of the turns; ``order`` is the trajectory's. ``first_version`` is the oldest that
    sampled a turn, ``last_version`` the newest. ``spans``: ``reset``, ``generate``, ``step``, each
    from when to when in unix seconds.
    """

    id: TrajectoryId
    attempt: int
    task_id: str
    source: str
    end_reason: EndReason
    length: int
    sampled_tokens: int
    turns: int
    images: int
    observation_images: int
    images_consistent: bool
    first_version: Version
    last_version: Version
    env_result: float | None = None
    seconds: float = 0.0
    prompt_tokens: int = 0
    """Tokens of ``length`` before the first sampled one."""
    repeated_tokens: int = 0
    """Tokens of ``length`` that its contexts have in common, and that are computed once."""
    cut: bool = False
    """Whether one of its sampled turns ended at a turn's or the episode's limit of tokens."""
    sent: ImagesSent = ImagesSent()
    turn_rewards: tuple[float, ...] = ()
    states: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    spans: tuple[tuple[str, float, float], ...] = field(default=(), compare=False)


SEED_BITS = 63


def derive(seed: int | str, *parts: int | str) -> int:
    """A seed in [0, 2**63) for the purpose named by ``parts``.

    It is the same on every machine and in every process. The parts' types and boundaries count:
    ``derive(0, "a", "b")``, ``derive(0, "ab")`` and ``derive(0, 1)``, ``derive(0, "1")`` differ.
    """
    # Python's hash of a text differs between processes; 63 bits fit into a signed int64.
    return int.from_bytes(_short_hash((seed, *parts)), "big") >> (64 - SEED_BITS)


def _short_hash(value: object) -> bytes:
    """64 bits of BLAKE2b over a value's representation."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
