"""Typed failures, and the rule that says who broke an episode.

The command line prints a ``RayloopError`` as one paragraph.

The rule: **what the policy broke is always scored; what the infrastructure or the data broke never
is; nothing else decides.** ``blame`` decides about foreign code that carries out what the policy
wrote. A grader's own failure is ``reward.on_error``'s.
"""

import difflib
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

AGAIN = 69
"""The exit code of a run that a failure of machines ended (EX_UNAVAILABLE): it may be started
again. ``node --requeue`` does so.
"""


def nearest(word: str, candidates: Sequence[str]) -> str:
    """``; did you mean `x`?``, or nothing when no candidate resembles ``word``."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""


def counted(number: int, noun: str) -> str:
    """``1 problem``, ``2 problems``: for messages."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Cause(StrEnum):
    """The cause of an episode's failure, which is never the policy."""

    RAISED = "raised"
    """The environment, the engine or this software raised."""
    BUG = "bug"
    """The environment's code raised in a way that does not depend on where it runs (a TypeError,
    not a full disk).
    """
    HUNG = "hung"
    LOST = "lost"
    BAD_DATA = "bad_data"
    """An image or a row cannot be used."""
    OVER_LONG = "over_long_prompt"
    DIVERGED = "diverged"
    """The engine's log-probs are not finite: the run ends with it."""


class Scope(StrEnum):
    """The part that a failure counts against."""

    EPISODE = "episode"
    """The task and the environment actor that played it."""
    PROCESS = "process"
    """The same, and the actor's process must end: it holds a call that hangs."""
    ENGINE = "engine"
    """The engine: the environment actor does its work."""
    BYSTANDER = "bystander"
    """Neither: the actor was ended because of another episode."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode was not played: a value for the driver (cluster/supervision/attempts.py).

    ``retryable``: another actor may play it. ``why`` is for people; ``path`` is the file of
    BAD_DATA.
    """

    cause: Cause
    scope: Scope
    retryable: bool
    why: str
    path: str = ""

    @property
    def of_actor(self) -> bool:
        """Whether it counts against the environment actor or the task."""
        return self.scope in (Scope.EPISODE, Scope.PROCESS)


class RayloopError(Exception):
    """Base of everything rayloop raises on purpose.

    ``exit_code`` is what the command line returns for it.
    """

    exit_code = 1


class ConfigError(RayloopError):
    """The configuration cannot work.

    The message says what was wrong, where (file and line), and what to do.
    """

    exit_code = 2


class RunNameInUse(ConfigError):
    """The run folder belongs to another live run, or holds a run that was not asked to resume."""


class RunTaken(RayloopError):
    """This process held the run, gave no sign of life, and another one has taken it: it must write
    nothing more.
    """


class ResourcesUnavailable(RayloopError):
    """The cluster cannot place the actors that the configuration asks for."""

    exit_code = AGAIN


class Preempted(RayloopError):
    """The run was asked to stop, saved, and ended before its last step."""

    exit_code = 75


class NotSaved(RayloopError):
    """The run was asked to stop, and its last steps could not be saved.

    The message says what a resume starts from.
    """


class DataFailure(RayloopError):
    """A task that always fails: missing or corrupt image, image bomb, malformed row.

    ``path`` names the file (and row).
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class ImageRefused(DataFailure):
    """An intact image whose size is not accepted: more pixels than the limit, or an extreme aspect
    ratio.
    """


class OverLongPrompt(RayloopError):
    """The rendered prompt exceeds the token limit.

    It is excluded with its size, never truncated.
    """

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(tokens, limit)
        self.tokens, self.limit = tokens, limit

    def __str__(self) -> str:
        return f"the prompt has {self.tokens} tokens, the limit is {self.limit}"


class InfrastructureFailure(RayloopError):
    """Something outside the policy and the data broke; the work is retried elsewhere within a
    budget.
    """


class StorageFailed(InfrastructureFailure):
    """A file that the run cannot do without could not be written or read: its storage is full,
    read-only or away.
    """

    exit_code = AGAIN


class WorkerLost(InfrastructureFailure):
    """An actor died, hung past its deadline, or became unreachable while serving a call."""

    exit_code = AGAIN


class AnswerLate(WorkerLost):
    """A call took longer than its deadline; its actor may be well."""


class WorkerSpent(WorkerLost):
    """An actor whose process holds too many threads that hang: it must be replaced.

    The call itself was not begun.
    """


class DeadlineExceeded(InfrastructureFailure):
    """A call into foreign code (environment, grader) outlived its deadline."""


class EnvironmentFailed(InfrastructureFailure):
    """An environment's code raised, or broke the protocol.

    ``bug``: on any machine (a TypeError, not a full disk).
    """

    def __init__(self, why: str, bug: bool = False) -> None:
        super().__init__(why, bug)
        self.bug = bug

    def __str__(self) -> str:
        return str(self.args[0])


class EnvironmentHung(EnvironmentFailed):
    """An environment's call outlived its deadline.

    ``contained``: it ran in a process of its own, which has ended.
    """

    def __init__(self, why: str, contained: bool = False) -> None:
        super().__init__(why)
        self.contained = contained


class AgentFailed(EnvironmentFailed):
    """The program of an environment that leads its episodes ended with an error.

    ``policys``: one that an answer of the policy may have caused.
    """

    def __init__(self, why: str, bug: bool = False, policys: bool = True) -> None:
        super().__init__(why, bug)
        self.policys = policys


class PolicyFailure(RayloopError):
    """What the policy did broke its environment: ``step`` or ``evaluate`` raises it, and the
    episode ends as ``policy_failure`` with the failing value, a reward like others.
    """


class ToolDeadline(PolicyFailure):
    """An environment's ``step`` raises it when the policy's action outlived the tool's deadline;
    the episode ends with it.
    """


class WorkerStartFailed(RayloopError):
    """An actor's constructor raised; the message carries its last line."""


class BroadcastFailed(InfrastructureFailure):
    """A member of the weights' process group died, or did not come in time.

    The other members' weights are as before.
    """


class RewardLost(RayloopError):
    """The grader is gone for longer, or fails more often, than its policy allows: the run ends
    instead of guessing rewards.
    """

    exit_code = AGAIN


class GraderBroken(RayloopError):
    """The reward's own code raised on every trajectory of the run's first group, or on all of its
    first evaluation.
    """


class FilterBroken(RayloopError):
    """A filter of one's own raised, or refused what is no kept member of the group."""


class AdvantageBroken(RayloopError):
    """An advantage of one's own raised, or returned what is no finite number for each member."""


class AlarmStopped(RayloopError):
    """What an alarm watches passed the limit at which the configuration stops the run."""


class PolicyLost(InfrastructureFailure):
    """A policy rank died: the group is rebuilt and the last checkpoint restored under a new
    lineage.
    """

    exit_code = AGAIN


class RolesExhausted(RayloopError):
    """A role had no actor for longer than ``recovery.start_timeout``."""

    exit_code = AGAIN


class GenerationBudgetSpent(RayloopError):
    """Too few trajectories survived the filters within ``max_generation_batches``.

    The message gives the counts.
    """


class LogprobMismatch(RayloopError):
    """The engine's log-probs do not follow the trainer's, or an image makes no difference to them."""


class WeightSyncError(RayloopError):
    """Synced weights did not arrive as sent: missing or unknown names, wrong bytes, wrong checksum,
    no effect.
    """


class CheckpointError(RayloopError):
    """A checkpoint could not be written or read. The previous complete one is still there."""


class CheckpointStorageFailed(CheckpointError):
    """The storage of the checkpoints is full, read-only or away: a later start may find it back."""

    exit_code = AGAIN


class MachineFailed(InfrastructureFailure):
    """Ray, a machine or its storage failed beyond recovery."""

    exit_code = AGAIN


class Unforeseen(RayloopError):
    """An error of no known type: a bug, in rayloop or in the user's code."""


class Stalled(RayloopError):
    """Nothing progressed within the stall timeout. The message names what was awaited."""

    exit_code = AGAIN


class LedgerError(RayloopError):
    """The trajectory accounting does not close: a bug in rayloop, never ignored."""


class Diverged(RayloopError):
    """Weights, log-probs, or the gradients of several updates in a row are not finite.

    They are neither saved nor sent.
    """


class Damaged(CheckpointError):
    """A file of a checkpoint, ``path``, is not there, or does not hold what was written into it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Blame(StrEnum):
    """Who broke an episode."""

    POLICY = "policy"
    """Scored: the policy sees the error, or the episode ends with it."""
    DATA = "data"
    INFRASTRUCTURE = "infrastructure"
    """Neither is scored: the episode is played again elsewhere, then excluded."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as far as ``blame_of`` needs it: the names of its class and its bases, and its
    ``errno``.
    """

    kinds: Sequence[str]
    errno: int | None = None


MACHINES = frozenset(
    {
        "InfrastructureFailure",
        "MemoryError",
        "ImportError",
        "ConnectionError",
        "TimeoutError",
        "CancelledError",
        "APIConnectionError",
        "TransportError",
        "ClosedResourceError",
        "BrokenResourceError",
        "EndOfStream",
        "WebSocketException",
        "ClientConnectionError",
        "RpcError",
        "TargetClosedError",
        "InvalidSessionIdException",
    }
)
"""Exceptions that blame no policy: of Python, and of clients that say so by their own names."""
OF_A_NAME = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
        errno.EILSEQ,
        errno.E2BIG,
    }
)
"""What a system says of a file's name or of a command, which a policy may have written; other
numbers are the machine's.
"""
LONGEST_CHAIN = 16


def raised(error: BaseException) -> list[Raised]:
    """The exception and those that led to it, the last one first."""
    chain: list[Raised] = []
    found: BaseException | None = error
    # Causes can form a circle, and a forged chain can be long.
    while found is not None and len(chain) < LONGEST_CHAIN:
        kinds = [kind.__name__ for kind in type(found).__mro__]
        chain.append(Raised(kinds, found.errno if isinstance(found, OSError) else None))
        if isinstance(found, BaseExceptionGroup):  # agents/host.py does the same in another Python
            found = found.exceptions[0]
        else:
            found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return chain


def blame_of(chain: Sequence[Raised]) -> Blame:
    """Who broke it, when foreign code raised this while it carried out what the policy wrote: the
    data or the infrastructure where an exception of the chain says so, else the policy.
    """
    for one in chain:
        if "DataFailure" in one.kinds:
            return Blame.DATA
        # A full disk or too many open files is the machine's, whatever the policy wrote.
        of_the_system = (
            "OSError" in one.kinds and one.errno is not None and one.errno not in OF_A_NAME
        )
        if of_the_system or not MACHINES.isdisjoint(one.kinds):
            return Blame.INFRASTRUCTURE
    return Blame.POLICY


def blame(error: BaseException) -> Blame:
    """``blame_of`` an exception."""
    return blame_of(raised(error))


@contextmanager
def carrying_out(what: str) -> Iterator[None]:
    """Around foreign code that carries out what the policy wrote.

    Raises PolicyFailure for what is the policy's to blame, and everything else as it is.
    """
    try:
        yield
    except PolicyFailure:
        raise
    except Exception as error:
        if blame(error) is not Blame.POLICY:
            raise
        raise PolicyFailure(f"{what} raised {type(error).__name__}: {error}") from error
