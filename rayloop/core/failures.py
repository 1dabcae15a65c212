"""Typed failures, and the rule that says who broke an episode.

The command line prints a ``RayloopError`` as one paragraph.

The rule: **what the policy broke is always scored; what the infrastructure or the data broke never
is.** ``blame`` decides about foreign code that carries out what the policy wrote. The rule leaves
out the grader's own bugs: ``reward.on_error`` decides whether they are scored.
"""

import difflib
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from rayloop.core.reports import class_of, names

START_AGAIN_EXIT_CODE = 69
"""The exit code of a run that a failure of machines ended (EX_UNAVAILABLE).

It may be started again; ``node --requeue`` does so.
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
    """The environment's code raised an error that no machine causes (a TypeError, no full disk)."""
    HUNG = "hung"
    LOST = "lost"
    """An actor, a process or a session ended."""
    UNREACHABLE = "unreachable"
    """No server answers, or the connection broke."""
    FULL = "full"
    """The server takes no further episode or request."""
    GRADER = "grader"
    """The environment's own judge or verifier failed."""
    BAD_DATA = "bad_data"
    """An image or a row cannot be used."""
    OVER_LONG = "over_long_prompt"
    DIVERGED = "diverged"
    """The engine's log-probs are not finite: the run ends with it."""


OF_INFRASTRUCTURE = frozenset(Cause) - {Cause.BAD_DATA, Cause.OVER_LONG, Cause.DIVERGED}
"""Causes for which neither the data nor the numbers of the policy are to blame."""


class Scope(StrEnum):
    """The part that a failure counts against."""

    EPISODE = "episode"
    """The task and the environment actor that played it."""
    PROCESS = "process"
    """The same, and the actor's process must end: it holds a call that hangs."""
    ENGINE = "engine"
    """The engine, not the environment actor."""
    BYSTANDER = "bystander"
    """Nothing: the actor was ended because of another episode."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode was not played: a value for the driver (cluster/supervision/attempts.py).

    Unless it is ``retryable``, the same ``why`` twice in a row ends the attempts
    (rollout/verdict.py). ``path`` is the file of BAD_DATA, ``server`` the address of the server
    that failed.
    """

    cause: Cause
    scope: Scope
    retryable: bool
    why: str
    path: str = ""
    server: str = ""

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
    """Another process has taken the run, since this one gave no sign of life.

    This process must write nothing more.
    """


class ResourcesUnavailable(RayloopError):
    """The cluster cannot place the actors that the configuration asks for."""

    exit_code = START_AGAIN_EXIT_CODE


class Preempted(RayloopError):
    """The run was asked to stop, saved, and ended before its last step."""

    exit_code = 75


class NotSaved(RayloopError):
    """The run was asked to stop, and its last steps could not be saved.

    The message says what a resume starts from.
    """


@dataclass(eq=False)
class FileFailure(RayloopError):
    """The failure of a file, ``path``."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class DataFailure(FileFailure):
    """A task that always fails: missing or corrupt image, image bomb, malformed row.

    ``path`` names the file (and row).
    """


class ImageRefused(DataFailure):
    """An intact image with more pixels than the limit, or an extreme aspect ratio."""


@dataclass(eq=False)
class OverLongPrompt(RayloopError):
    """The rendered prompt exceeds the token limit.

    It is excluded with its size, never truncated.
    """

    tokens: int
    limit: int

    def __str__(self) -> str:
        return f"the prompt has {self.tokens} tokens, the limit is {self.limit}"


class InfrastructureFailure(RayloopError):
    """Something outside the policy and the data broke.

    The work is retried elsewhere within a budget.
    """


class StorageFailed(InfrastructureFailure):
    """A file that the run needs could not be written or read.

    Its storage is full, read-only or unreachable.
    """

    exit_code = START_AGAIN_EXIT_CODE


class WorkerLost(InfrastructureFailure):
    """An actor died, hung past its deadline, or became unreachable while serving a call."""

    exit_code = START_AGAIN_EXIT_CODE


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

    ``bug``: on any machine (a TypeError, not a full disk). ``cause``: BUG or RAISED where None is
    given. ``server``: the address of the server that failed, "" where there is none.
    """

    def __init__(
        self, why: str, bug: bool = False, cause: Cause | None = None, server: str = ""
    ) -> None:
        super().__init__(why, bug)
        self.bug = bug
        self.cause = cause or (Cause.BUG if bug else Cause.RAISED)
        self.server = server

    def __str__(self) -> str:
        return str(self.args[0])


class EnvironmentHung(EnvironmentFailed):
    """An environment's call outlived its deadline.

    ``contained``: it ran in a separate process, which has ended.
    """

    def __init__(self, why: str, contained: bool = False) -> None:
        super().__init__(why)
        self.contained = contained


class AgentFailed(EnvironmentFailed):
    """The program of an agent-driven environment ended with an error.

    ``policys``: an answer of the policy may have caused the error.
    """

    def __init__(
        self, why: str, policys: bool = True, cause: Cause | None = None, server: str = ""
    ) -> None:
        super().__init__(why, True, cause, server)
        self.policys = policys


class PolicyFailure(RayloopError):
    """An action of the policy broke its environment.

    ``step`` or ``evaluate`` raises it, and the episode ends as ``policy_failure`` with the failing
    value, a reward like others.
    """


class ToolDeadline(PolicyFailure):
    """The policy's action outlived the tool's deadline.

    An environment's ``step`` raises it, and the episode ends with it.
    """


class WorkerStartFailed(RayloopError):
    """An actor's constructor raised; the message carries its last line."""


class BroadcastFailed(InfrastructureFailure):
    """A member of the weights' process group died, or did not come in time.

    The other members' weights are as before.
    """


class RewardLost(RayloopError):
    """The grader is missing for longer, or fails more often, than its settings allow.

    The run ends instead of guessing rewards.
    """

    exit_code = START_AGAIN_EXIT_CODE


class GraderBroken(RayloopError):
    """The reward's own code raised on the whole first group, or on the whole first evaluation."""


class FilterBroken(RayloopError):
    """A custom filter raised, or refused something other than a kept member of the group."""


class AdvantageBroken(RayloopError):
    """A custom advantage raised, or did not return a finite number for each member."""


class AlarmStopped(RayloopError):
    """A value that an alarm watches passed the limit at which the configuration stops the run."""


class PolicyLost(InfrastructureFailure):
    """A policy rank died.

    The group is rebuilt and the last checkpoint restored under a new lineage.
    """

    exit_code = START_AGAIN_EXIT_CODE


class RolesExhausted(RayloopError):
    """A role had no actor for longer than ``recovery.start_timeout``."""

    exit_code = START_AGAIN_EXIT_CODE


class GenerationBudgetSpent(RayloopError):
    """Too few trajectories survived the filters within ``max_generation_batches``.

    The message gives the counts.
    """


class LogprobMismatch(RayloopError):
    """The engine's log-probs do not follow the trainer's, or images make no difference to them."""


class WeightSyncError(RayloopError):
    """Synced weights did not arrive as sent.

    Names are missing or unknown, bytes or a checksum are wrong, or the weights have no effect.
    """


class CheckpointError(RayloopError):
    """A checkpoint could not be written or read. The previous complete one still exists."""


class CheckpointStorageFailed(CheckpointError):
    """The storage of the checkpoints is full, read-only or unreachable.

    A later start may be able to use it.
    """

    exit_code = START_AGAIN_EXIT_CODE


class MachineFailed(InfrastructureFailure):
    """Ray, a machine or its storage failed beyond recovery."""

    exit_code = START_AGAIN_EXIT_CODE


class Unforeseen(RayloopError):
    """An error of an unknown type: a bug, in rayloop or in the user's code."""


class Stalled(RayloopError):
    """Nothing progressed within the stall timeout. The message names the awaited calls."""

    exit_code = START_AGAIN_EXIT_CODE


class LedgerError(RayloopError):
    """The trajectory accounting does not close: a bug in rayloop, never ignored."""


class Diverged(RayloopError):
    """Weights, log-probs, or the gradients of several updates in a row are not finite.

    They are neither saved nor sent.
    """


class Damaged(FileFailure, CheckpointError):
    """A file of a checkpoint, ``path``, is missing, or differs from the bytes that were written."""


class Blame(StrEnum):
    """The cause of a broken episode."""

    POLICY = "policy"
    """Scored: the policy sees the error, or the episode ends with it."""
    DATA = "data"
    INFRASTRUCTURE = "infrastructure"
    """Like data, it is not scored: the episode is played again elsewhere, then excluded."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The facts about an exception that ``blame_of`` needs.

    ``kinds`` are the names of its class and its bases.
    """

    kinds: Sequence[str]
    errno: int | None = None


MACHINES = names("exceptions")
"""Exceptions that blame no policy, of Python and of clients with such names."""
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
"""Error numbers that a file's name or a command causes, which a policy may have written.

All other numbers are the machine's.
"""
LONGEST_CHAIN = 16


def raised(error: BaseException) -> list[Raised]:
    """The exception and the ones that led to it, the last one first."""
    chain: list[Raised] = []
    link: BaseException | None = error
    # Causes can form a circle, and a forged chain can be long.
    while link is not None and len(chain) < LONGEST_CHAIN:
        kinds = [kind.__name__ for kind in type(link).__mro__]
        chain.append(Raised(kinds, link.errno if isinstance(link, OSError) else None))
        if isinstance(link, BaseExceptionGroup):  # agents/host.py does the same in another Python
            link = link.exceptions[0]
        else:
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def blame_of(chain: Sequence[Raised]) -> Blame:
    """The cause of an exception that foreign code raised while it carried out the policy's text.

    The data or the infrastructure where an exception of the chain shows it, else the policy.
    """
    for exception in chain:
        if "DataFailure" in exception.kinds:
            return Blame.DATA
        if _is_of_machine(exception) or not MACHINES.isdisjoint(exception.kinds):
            return Blame.INFRASTRUCTURE
    return Blame.POLICY


def cause_of(chain: Sequence[Raised]) -> Cause:
    """The cause of an exception that blames the infrastructure: its first class with a row."""
    for exception in chain:
        for kind in exception.kinds:
            if kind in MACHINES:
                return Cause(class_of("exceptions", kind))
    return Cause.RAISED


def _is_of_machine(exception: Raised) -> bool:
    """Whether the machine caused an OSError, such as a full disk, whatever the policy wrote."""
    number = exception.errno
    return "OSError" in exception.kinds and number is not None and number not in OF_A_NAME


def blame(error: BaseException) -> Blame:
    """``blame_of`` an exception."""
    return blame_of(raised(error))


@contextmanager
def carrying_out(what: str) -> Iterator[None]:
    """A context for foreign code that carries out the policy's text.

    Raises PolicyFailure for an exception that the policy caused, and any other as it is.
    """
    try:
        yield
    except PolicyFailure:
        raise
    except Exception as error:
        if blame(error) is not Blame.POLICY:
            raise
        raise PolicyFailure(f"{what} raised {type(error).__name__}: {error}") from error
