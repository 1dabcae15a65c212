"""Which duration of a run bounds what, in one table and one order: whoever waits longer must not give up first.

A call that hangs has to be told by its own deadline, which knows what to do about it (play elsewhere, rebuild, leave out). If what
waits for that call gives up at the same time, what happens is a race. ``check`` refuses such a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from rayloop.core.failures import ConfigError

EPISODE, STEP = "environment.episode_timeout", "policy.step_timeout"
SYNC, STALL = "weight_sync.timeout", "recovery.stall_timeout"


@dataclass(frozen=True)
class Duration:
    """``key`` bounds ``what``; when it is over, ``then``. It must be shorter than the key ``within``, taken ``times`` times."""

    key: str
    what: str
    then: str
    within: str = ""
    times: int = 1


DURATIONS = (
    Duration("environment.episode.step_timeout", "one `step`", "the environment hangs: played again", EPISODE),
    Duration("environment.episode.evaluate_timeout", "one `evaluate`", "the same", EPISODE),
    Duration("environment.episode.reset_timeout", "making an environment, and resetting it", "the same", EPISODE, 2),
    Duration("environment.episode.request_timeout", "one generation request", "lost: another engine is asked", EPISODE),
    Duration(EPISODE, "a whole episode", "it hangs: played again; an actor that has not said so 90 s later is replaced", STALL),
    Duration("reward.timeout", "scoring one trajectory, tried twice", "unscored as `timeout`, or the failing value", STALL, 2),
    Duration("reference.timeout", "the reference's log-probs of one group", "the actor is replaced and asked again", STALL),
    Duration("policy.engine.collective_timeout", "one collective of the ranks", "it fails, and the ranks are rebuilt", STEP),
    Duration(STEP, "a trainer's step, a checkpoint, an export", "the ranks are rebuilt from the checkpoint", STALL),
    Duration("weight_sync.transport.timeout", "each bucket of a broadcast", "the object store's copy is loaded", SYNC),
    Duration(SYNC, "an engine's taking over of weights", "the engine is replaced", STALL),
    Duration("recovery.health_timeout", "the answer to a health check", "the actor is replaced", "recovery.start_timeout"),
    Duration("recovery.start_timeout", "placing all actors, and starting one", "the run ends, and says what was missing", STALL),
    Duration("recovery.stall_report", "nothing having moved", "what is awaited becomes an event, with stacks", STALL),
    Duration(STALL, "nothing having moved at all", "the run ends: some wait has no deadline of its own"),
    Duration("preemption.grace", "saving, after SIGTERM", "the run ends unsaved; set it below what the scheduler allows"),
    Duration("recovery.health_every", "the pause between two health checks", "idle actors are asked again"),
)  # fmt: skip
"""From the innermost wait to the outermost; those without ``within`` are bounded by nothing in the configuration."""


def check(config: BaseModel) -> None:
    """Raises ConfigError that names, with their values, all durations which are not shorter than what waits for them."""
    problems = list(_problems(config))
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(config: BaseModel) -> Iterator[str]:
    for outer in dict.fromkeys(each.within for each in DURATIONS if each.within):
        limit = value_of(config, outer)
        late = [each for each in DURATIONS if each.within == outer and _seconds(config, each) >= (limit or 0.0)]
        if limit is not None and late:
            calls = ", ".join(f"{_named(each)} ({_seconds(config, each):g} s)" for each in late)
            yield f"{outer} ({limit:g} s) must be longer than {calls}, which it waits for. Raise it, or lower what is named"


def _named(each: Duration) -> str:
    return each.key if each.times == 1 else f"{each.times} x {each.key}"


def _seconds(config: BaseModel, each: Duration) -> float:
    return each.times * (value_of(config, each.key) or 0.0)


def value_of(config: BaseModel, key: str) -> float | None:
    """Seconds; None where the kind that is chosen has no such key."""
    place: object = config
    for name in key.split("."):
        if not isinstance(place, BaseModel) or name not in type(place).model_fields:
            return None
        place = place.__dict__[name]
    return float(str(place))


def table(config: BaseModel) -> str:
    """The table of docs/choosing_settings.md, with the values of ``config``."""
    lines = ["| key | default | seconds for | when they are over | shorter than |", "|---|---|---|---|---|"]
    for each in DURATIONS:
        default = value_of(config, each.key)
        seconds = f"{default:g}" if default is not None else "60 (collective)"
        shorter = f"`{each.within}`" if each.within else ""
        lines.append(f"| `{each.key}` | {seconds} | {each.what} | {each.then} | {shorter} |")
    return "\n".join(lines) + "\n"
