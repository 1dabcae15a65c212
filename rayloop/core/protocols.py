"""The interfaces of the replaceable parts.

The configuration names an implementation by a dotted path or a ``kind``; nothing is registered.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from rayloop.core.files import Checksum
from rayloop.core.groups import Outcome
from rayloop.core.types import (
    STREAMS,
    Completion,
    ImageSource,
    Message,
    Sampling,
    Streams,
    Task,
    TokenPrompt,
    Trajectory,
    Version,
)

Checksums: TypeAlias = Mapping[str, Checksum]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The load of an engine, and the ``version`` that it serves; None before its first load.

    ``running`` counts requests being decoded. ``cache`` is the share of the engine's cache of keys
    and values that is in use; None when it has none to run out of.
    """

    version: Version | None
    running: int
    waiting: int
    cache: float | None = None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a weight sync, as the receiver must find it.

    ``checksum``: by ``rayloop.transports.manifest``.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of a weight update (docs/algorithm.md, section 10).

    The names come from the Hugging Face checkpoint.
    """

    version: Version
    tensors: Mapping[str, TensorRecord]


Level = Literal["level1", "level2"]
"""How deep an engine sleeps, in vLLM's words."""


class GenerationEngine(Protocol):
    """Tokens in; tokens, log-probs and version out.

    All methods run on the rollout actor's event loop.
    """

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn, with its ``kept`` tokens where ``Sampling.effective_top_k`` is a number.

        Requests with equal prompts, which come in the same moment, share prefill and image
        encoding.
        """

    async def leave(self, cohort: str) -> None:
        """Stop waiting for a member of ``cohort`` that ended its episode (deterministic mode)."""

    async def pause(self) -> None:
        """Called before ``load``: no new batch starts; returns when no request is being decoded."""

    async def resume(self) -> None:
        """Called after ``load``, in a ``finally``."""

    async def load(self, manifest: Manifest, tensors: Mapping[str, Any]) -> None:
        """Replace the weights and forget cached prefixes.

        Raises WeightSyncError; the old version is then not served.
        """

    def health(self) -> EngineHealth:
        """The version that is served, and the load."""


class SleepingEngine(GenerationEngine, Protocol):
    """An engine that shares its GPU with the policy in turns.

    Both methods do nothing when the engine is in that state already.
    """

    async def sleep(self, level: Level) -> None:
        """Give the GPU's memory back, after ``pause``.

        The weights go to main memory; with level2 they are dropped.
        """

    async def wake_up(self) -> None:
        """Take the GPU's memory again.

        After level2 the weights have any values, and no version, until ``load``.
        """


@runtime_checkable
class ProfiledEngine(Protocol):
    """An engine that computes with torch (``profile.steps``)."""

    async def profile(self, path: str | None) -> None:
        """Begin a profile; with ``path``, end it and write it as a Chrome trace (``.json.gz``)."""


class StreamingEngine(GenerationEngine, Protocol):
    """An engine whose own processes can receive a broadcast of weights."""

    async def receive(self, version: Version, broadcast: bytes) -> None:
        """Replace the weights by a broadcast, in place of ``load``.

        ``broadcast`` has the pickled settings and the process group of
        ``rayloop.transports.collective.BroadcastReceiver``. Raises BroadcastFailed, too.
        """


@dataclass(frozen=True, slots=True)
class Observation:
    """The policy's next input: chat messages (``reset``), or the parts of a message (``step``)."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one turn.

    ``observation`` None or ``done`` ends the episode. ``error``: the environment could not use the
    action; the episode ends as ACTION_ERROR with ``done``, else the policy sees the observation.
    ``reward``: of this turn alone, a finite number (else the step is the environment's failure);
    ``evaluate`` returns the episode's result.
    """

    observation: Observation | None = None
    done: bool = False
    error: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    reward: float = 0.0


class Environment(Protocol):
    """One episode's world.

    Each method may be a coroutine function; all have a deadline (``environment.episode``).

    All methods of an instance run in its own thread (with ``isolation: process`` the main thread of
    a process), and coroutines on one event loop in it, so it may keep a database connection or a
    browser. A class whose plain methods never wait may set ``immediate = True`` in its own body:
    the actor's event loop then calls them, without a thread and without a deadline.

    An attribute ``tools``, a sequence of Tool, is read after ``reset`` and given to the chat
    template; ``step`` carries out calls.

    A tool, shell or page that the policy's action starts needs a deadline shorter than
    ``episode.step_timeout``, for example ``rayloop.core.threads.call_within``. When it passes,
    ``step`` answers with an ``error``, or raises ToolDeadline: the episode ends as
    ``tool_deadline`` with the number of ``reward.on_error``. A method that misses its own timeout
    is the environment's failure: never a reward, played again elsewhere; after
    ``environment.attempts`` such episodes of a group the task is quarantined. PolicyFailure is the
    policy's (``rayloop.core.failures.carrying_out`` raises it for exceptions of foreign code on a
    move), DataFailure the task's, and any other exception the environment's too.
    """

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin the episode. Returns the prompt's messages."""

    def step(self, text: str) -> StepResult | Awaitable[StepResult]:
        """Carry out the policy's turn, which is cut behind its stop string."""

    def evaluate(self) -> float | Awaitable[float | None] | None:
        """The environment's result of the finished episode; None: only the reward source judges."""

    def close(self) -> Awaitable[None] | None:
        """Release the resources of the episode. Called at its end, also after a failure."""


class AgentDrivenEnvironment(Protocol):
    """An environment whose own program, an agent, asks the policy as an OpenAI client.

    Its class has ``agent_driven = True``; it is called on the actor's event loop. ``model`` is the
    name under which its program asks for the policy. Where it has an ``on_error`` that is a number,
    an AgentFailed after an answer ends the episode with that result.
    ``rayloop.envs.agent_env:AgentEnv`` is the shipped one.
    """

    model: str

    async def reset(self, task: Task) -> Observation:
        """Check that an episode could begin, for ``env check``; no episode begins with it."""

    async def run_agent(self, task: Task, address: Mapping[str, str]) -> float | None:
        """Run the program to its end, with ``address``: ``base_url``, ``api_key``, ``model``.

        Returns the episode's result, or None. When it is cancelled, nothing of the program is left.
        Raises AgentFailed when the program ended with an error.
        """

    def close(self) -> None:
        """Release the environment's resources; no other method is called afterwards."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool: ``text``, then ``images``."""

    text: str = ""
    images: tuple[ImageSource, ...] = ()


class Tool(Protocol):
    """A function the policy may call; ``parameters`` is a JSON schema.

    It runs in a thread under ``tool_timeout``; eight threads that hang replace the actor, so slow
    tools are better subprocesses. Fetch files in ``reset``.
    """

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""

    @property
    def description(self) -> str:
        """A description of the tool, for the chat template."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""

    def __call__(self, **arguments: Any) -> ToolResult:
        """Run it.

        The policy sees the text of a ToolError, and exceptions that ``rayloop.core.failures.blame``
        gives to it; any other is the environment's failure.
        """


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The end of a program: ``exit_code`` None: not by its deadline; 128 + a signal: by that.

    ``truncated``: not all output was kept.
    """

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False


class ProgramSandbox(Protocol):
    """Runs untrusted programs in a separate folder; calls block, and come from any thread.

    A failure of anything but the program is an InfrastructureFailure, also after ``close``; an
    invalid command, or a path outside of the folder, is a ValueError.
    """

    def exec(self, command: Sequence[str], *, stdin: bytes = b"", timeout: float) -> ProgramResult:
        """Run ``command``, no shell, for at most ``timeout`` seconds.

        The next command sees its files.
        """

    def read(self, path: str) -> bytes:
        """A file, by its path in the folder. Raises FileNotFoundError without such a file."""

    def write(self, path: str, content: bytes) -> None:
        """Make or replace a file, with the folders above it.

        Raises OSError when there is no place for it.
        """

    def close(self) -> None:
        """End the programs and remove their files. May be called again."""


@dataclass(frozen=True, slots=True)
class ScoreContext:
    """The inputs of a reward besides the trajectory.

    ``timeout``: seconds until scoring is given up (``reward.timeout``). ``transcript``: all text
    after the prompt, with special tokens; None unless the source asks for it. ``dry_run``: a user
    waits for the outcome (``try``), so scoring does not wait for an absent service.
    """

    step: int
    texts: Sequence[str]
    timeout: float = 600.0
    transcript: str | None = None
    dry_run: bool = False


class RewardSource(Protocol):
    """Judges finished episodes; ``score`` may be a coroutine function.

    A source that raises has failed: the trajectory is left out, or gets ``reward.on_error``
    (docs/rewards.md). RewardLost and ConfigError end the run. The attribute ``infrastructure`` has
    the exception types that are failures of something outside (True: all are); a trajectory that
    ends with two of them is ``reward_unavailable``. With ``transcript = True`` the context has the
    transcript.
    """

    def score(
        self, trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> Outcome | Awaitable[Outcome]:
        """The outcome of one episode."""


class GroupRewardSource(Protocol):
    """Judges a group's trajectories together (``reward.per: group``) once its episodes have ended.

    It gets the ones that can be scored, in the order of their samples, and returns one outcome for
    each; an error concerns all of them, as in ``RewardSource``. A single one (a held-out answer) is
    given to ``score``, where the source has that.
    """

    def score_group(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> Sequence[Outcome] | Awaitable[Sequence[Outcome]]:
        """One outcome for each trajectory."""


Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 as fractions of an image's width and height."""


class BoxReader(Protocol):
    """Boxes to draw over a task's first image (``report.boxes``). Both may be empty."""

    def true(self, truth: Any) -> Sequence[Box]:
        """The boxes of the ground truth, as JSON keeps it (a tuple is a list)."""

    def answered(self, text: str) -> Sequence[Box]:
        """The boxes in the last sampled turn's text, which may be any text."""


@dataclass(frozen=True, slots=True)
class TrainItem:
    """One trajectory to train on; reference log-probs [sampled_tokens] or None.

    ``on_policy``: a replayed sample whose old log-probs are recomputed (weight 1). ``lag``: steps
    between its oldest weights and these. ``turns``: an advantage for each sampled turn, in place of
    one for all. ``group_tokens``: sampled tokens of its group in the update. For a segment,
    ``part_of`` and ``trajectory_tokens`` are the number and the sampled tokens of its trajectory in
    the update; 0: the segment is the trajectory.
    """

    trajectory: Trajectory
    advantage: float
    ref_logprobs: Any = None
    on_policy: bool = False
    lag: int = 0
    turns: tuple[float, ...] = ()
    streams: Streams = STREAMS
    group_tokens: int = 0
    part_of: int = 0
    trajectory_tokens: int = 0
