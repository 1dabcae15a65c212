"""The fate of a failure: from what a call of an actor ended with to what is done about it. docs/reliability.md shows the table.

Pools, the policy's ranks, readers of payloads and the end of a run ask here and nowhere else. A test walks through
``ray.exceptions``: a class that a new Ray brings must get its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from ray import exceptions as ray

from rayloop.core.failures import MachineFailed, PolicyLost, RayloopError, Unforeseen, WorkerLost, WorkerStartFailed


class FailureFate(StrEnum):
    """What is done about a failure."""

    REPLACE = "replace worker"
    """The process that was asked, or its machine, is the trouble: another one takes its place and the work is done there."""
    REBUILD = "rebuild policy"
    """The same of a rank: all ranks are replaced, and the newest checkpoint is restored."""
    EXCLUDE = "exclude payload"
    """An object is gone: its trajectory is left out and made up for; weights are synced again."""
    END = "end typed"
    """Neither another process nor less data helps: the run saves what it can, says so and ends."""


REPLACE, REBUILD, EXCLUDE, END = FailureFate
FATES: Mapping[type[BaseException], tuple[FailureFate, str]] = MappingProxyType(
    {
        ray.RayActorError: (REPLACE, "the actor is gone"),
        ray.ActorDiedError: (REPLACE, "its process died, was killed, or its node went"),
        ray.ActorUnavailableError: (REPLACE, "it cannot be reached: a lost message, a broken network, a dying node"),
        ray.AsyncioActorExit: (REPLACE, "it left by itself"),
        ray.OutOfMemoryError: (REPLACE, "Ray's memory monitor ended it"),
        ray.WorkerCrashedError: (REPLACE, "its process ended in the middle of the call"),
        ray.NodeDiedError: (REPLACE, "its node is gone"),
        ray.OutOfDiskError: (REPLACE, "the disk below the object store of its node is full"),
        ray.ObjectStoreFullError: (REPLACE, "the object store of its node is full"),
        ray.ActorUnschedulableError: (REPLACE, "it could not be placed; another attempt may be"),
        ray.RuntimeEnvSetupError: (REPLACE, "its node could not prepare the environment"),
        ray.RaySystemError: (REPLACE, "something in Ray broke on the way"),
        ray.RpcError: (REPLACE, "a message was lost"),
        ray.TaskCancelledError: (REPLACE, "the end of another call took it along; what it did is not known"),
        ray.GetTimeoutError: (REPLACE, "no answer in time"),
        TimeoutError: (REPLACE, "no answer in time"),
        MemoryError: (REPLACE, "its process has no memory left"),
        WorkerLost: (REPLACE, "no answer in time, or it says that it is of no use any more"),
        PolicyLost: (REBUILD, "a rank died, hung or could not be reached"),
        ray.ObjectLostError: (EXCLUDE, "no copy of the object is left"),
        ray.ObjectFetchTimedOutError: (EXCLUDE, "no copy could be fetched in time"),
        ray.ObjectReconstructionFailedError: (EXCLUDE, "no copy is left, and what made it does not run twice"),
        ray.ObjectFreedError: (EXCLUDE, "it was freed"),
        ray.OwnerDiedError: (EXCLUDE, "who owned it died"),
        ray.ReferenceCountingAssertionError: (EXCLUDE, "Ray has let it go already"),
        ray.PlasmaObjectNotAvailable: (EXCLUDE, "it is not in the object store"),
        ray.LocalRayletDiedError: (END, "the driver's own node is going"),
        ray.ActorPlacementGroupRemoved: (END, "the run's reservation is gone"),
        ray.TaskPlacementGroupRemoved: (END, "the run's reservation is gone"),
        ray.AuthenticationError: (END, "the cluster has another token"),
        ray.RayTaskError: (END, "without a cause below it; with one, the cause counts"),
        ray.RayError: (END, "of no kind that is known"),
        ray.UserCodeException: (END, "code raised"),
        ray.UnserializableException: (END, "what was raised cannot be read here"),
        ray.OufOfBandObjectRefSerializationException: (END, "a reference where none may be"),
        ray.CrossLanguageError: (END, "not used here"),
        ray.TaskUnschedulableError: (END, "not used here: no tasks outside of actors"),
        ray.PendingCallsLimitExceeded: (END, "not used here: calls are not limited"),
        ray.ActorAlreadyExistsError: (END, "two actors of one name"),
        ray.ActorHandleNotFoundError: (END, "a handle of a cluster that was left"),
        ray.ObjectRefStreamEndOfStreamError: (END, "not used here: no streams"),
        ray.StreamingGeneratorReplayInconsistentError: (END, "not used here: no streams"),
        ray.RayChannelError: (END, "not used here: no compiled graphs"),
        ray.RayChannelTimeoutError: (END, "not used here: no compiled graphs"),
        ray.RayCgraphCapacityExceeded: (END, "not used here: no compiled graphs"),
        ray.RayDirectTransportError: (END, "not used here: no direct transport"),
    }
)
"""By class, with the reason. A class that is not here has the fate of its nearest base, and END without one."""
DEVICE = ("AcceleratorError", "CUDA error")
"""What torch calls a device that failed for good, which the process never gets back: the type's name, or words of its text."""


def cause(error: BaseException) -> BaseException:
    """The error raised inside the actor, without Ray's wrapping."""
    while isinstance(error, ray.RayTaskError) and error.cause is not None:
        error = error.cause
    return error


def fate(error: BaseException, ranks: int = 0) -> FailureFate:
    """What is done about an error that the call of an actor ended with. ``ranks``: of the policy, if they were called.

    A failing collective is a RuntimeError on the ranks that live: it looks like any other, and with more ranks than one it
    counts as a lost rank. Memory of a device that does not suffice would not suffice again.
    """
    below = cause(error)
    if getattr(below, "actor_init_failed", False):  # its constructor raised, which it would do again
        return END
    found = next((FATES[kind][0] for kind in type(below).__mro__ if kind in FATES), END)
    if found is END and isinstance(below, RuntimeError):
        names = {kind.__name__ for kind in type(below).__mro__}
        if "OutOfMemoryError" in names:
            return END
        if ranks > 1 or DEVICE[0] in names or DEVICE[1] in str(below):
            found = REPLACE
    return REBUILD if ranks and found is not END else found


def is_lost(error: BaseException) -> bool:
    """Whether the actor, not the work, is the problem."""
    return fate(error) is REPLACE


def object_lost(error: BaseException) -> bool:
    """Whether an object is gone: fetching it failed, or a call that was given it."""
    return fate(error) is EXCLUDE


def typed(error: BaseException) -> RayloopError:
    """How a run ends that has no way on after this error."""
    below = cause(error)
    if isinstance(below, RayloopError):
        return below
    if getattr(below, "actor_init_failed", False):
        return WorkerStartFailed(f"an actor did not start: {str(below).strip().splitlines()[-1]}")
    machine = isinstance(below, ray.RayError | OSError) or fate(below) is not END
    text = (str(below).strip() or "it says nothing").splitlines()[0]
    return (MachineFailed if machine else Unforeseen)(f"{type(below).__name__}: {text}")


def table() -> str:
    """For docs/reliability.md: a line per class, as Markdown. ``python -m rayloop.actors.fates`` prints it."""
    lines = (f"| `{kind.__name__}` | {found} | {why} |" for kind, (found, why) in FATES.items())
    return "\n".join(["| raised | fate | because |", "|---|---|---|", *lines])


if __name__ == "__main__":
    print(table())
