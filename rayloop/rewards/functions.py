"""Plain functions as rewards, in rayloop's own form, TRL's or verl's (docs/rewards.md); the names
of the parameters identify the form. All may be coroutine functions. A parameter that nothing fills
and that has no default is an error of the function.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from numbers import Number
from typing import Any, Literal

from rayloop.config.explain import short
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import GroupRewardSource, RewardSource, ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.data.dataset import TRUTHS


def as_outcome(result: Any) -> Outcome:
    """The outcome of one result: an Outcome, or a value that ``float`` makes a finite number (a
    bool, a tensor without dimensions). Anything else, texts included, is an invalid reward; such
    components are dropped and flagged ``invalid_component``.
    """
    if isinstance(result, Unscored):
        return result
    scored = result if isinstance(result, Scored) else Scored(result)
    value = number(scored.value)
    if value is None:
        why = f"the reward source returned {short(scored.value, 200)}, not a finite number"
        return Unscored(UnscoredKind.INVALID_REWARD, why, why)
    given = {str(name): number(value) for name, value in scored.components.items()}
    components = {name: found for name, found in given.items() if found is not None}
    dropped = ("invalid_component",) if len(components) < len(scored.components) else ()
    return Scored(value, components, (*map(str, scored.flags), *dropped), reason=str(scored.reason))


def number(value: Any) -> float | None:
    """``float(value)`` if that is finite, else None.

    Arrays and tensors must be without dimensions.
    """
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, str | bytes | bytearray) or getattr(value, "shape", ()) != ():
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def as_outcomes(result: Any, count: int) -> list[Outcome]:
    """``as_outcome`` of each of ``count`` elements.

    Raises TypeError for a result without elements (or a generator, which would run here),
    ValueError for another number of them.
    """
    found = None if isinstance(result, Iterator) else elements(result, count + 1)
    if found is None:
        raise TypeError(
            f"a list of {count} outcomes was expected, one per trajectory, not {short(result, 200)}"
        )
    if len(found) != count:
        raise ValueError(
            f"{count} outcomes were expected, one per trajectory, not"
            f" {len(found) if len(found) < count else 'more'}"
        )
    return [as_outcome(one) for one in found]


def elements(result: Any, most: int) -> list[Any] | None:
    """The first ``most`` elements of a list, an array, a tensor or a generator; None for any other
    value.
    """
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping | Set):
        return None
    return None if getattr(result, "shape", None) == () else list(islice(result, most))


Per = Literal["trajectory", "group"]
METHODS: dict[Per, str] = {"trajectory": "score", "group": "score_group"}
"""The method that a class must have, by ``reward.per``."""
OWN = ("trajectory", "task", "context")
GROUP = ("trajectories", "task", "contexts")
UNAVAILABLE = (InfrastructureFailure, OSError, MemoryError)
"""Exceptions that are always failures of the infrastructure, whatever a grader declares."""


@dataclass(frozen=True)
class RewardCall:
    """One call of a reward function: the function's parameters ``takes``, and what is scored."""

    takes: Mapping[str, inspect.Parameter]
    trajectories: Sequence[Trajectory]
    task: Task
    contexts: Sequence[ScoreContext]


class FunctionReward:
    """A function as a source: ``form`` makes its keyword arguments, and an outcome of its result."""

    def __init__(self, function: Callable[..., Any], form: "FunctionForm") -> None:
        self._function, self._form = function, form
        self._takes = inspect.signature(function).parameters
        self.infrastructure = getattr(getattr(function, "func", function), "infrastructure", False)

    def _call(self, call: RewardCall, read: Callable[[Any, dict[str, Any]], Any]) -> Any:
        offered, components = self._form.arguments(call), dict[str, Any]()
        if "log_metric" in offered:
            offered["log_metric"] = components.__setitem__
        result = self._function(**self._chosen(offered))
        if not inspect.isawaitable(result):
            return read(result, components)

        async def later() -> Any:
            return read(await result, components)

        return later()

    def _chosen(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """The offered arguments that the function takes.

        Raises TypeError that names the missing ones.
        """
        if any(p.kind is p.VAR_KEYWORD for p in self._takes.values()):
            chosen = dict(offered)
        else:
            chosen = {name: value for name, value in offered.items() if name in self._takes}
        lacks = [name for name in _required(self._takes) if name not in chosen]
        if lacks:
            known = ", ".join(sorted(offered))
            raise TypeError(
                f"the reward function wants {', '.join(lacks)}, and the row has no such column;"
                f" offered are {known}"
            )
        return chosen

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Any:
        """The outcome of one trajectory (``reward.per: trajectory``)."""
        return self._call(
            RewardCall(self._takes, [trajectory], task, [context]), self._form.outcome
        )

    def score_group(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> Any:
        """The outcomes of a group, in order (``reward.per: group``)."""
        call = RewardCall(self._takes, trajectories, task, contexts)
        return self._call(
            call, lambda result, parts: self._form.outcomes(result, len(trajectories), parts)
        )


class FunctionForm:
    """One library's form of a reward function; this class is our own form, for one trajectory."""

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        """All arguments that a function of this form may take."""
        return {"trajectory": call.trajectories[0], "task": call.task, "context": call.contexts[0]}

    def outcome(self, result: Any, components: dict[str, Any]) -> Any:
        """The outcome of one trajectory."""
        return result

    def outcomes(self, result: Any, count: int, components: dict[str, Any]) -> Any:
        """The outcomes of a group of ``count``."""
        return result


class GroupForm(FunctionForm):
    """Our own form, for a group."""

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        """The parameters of ``score_group``."""
        return {"trajectories": call.trajectories, "task": call.task, "contexts": call.contexts}


@dataclass(frozen=True)
class TrainerState:
    """The part of TRL's ``trainer_state`` that exists here: the reward actor does not know the
    length of the run.
    """

    global_step: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state has no {name} here: of TRL's there is global_step only"
        )


class TrlForm(FunctionForm):
    """TRL's form.

    ``completions`` has a list of messages, one per turn; a text for ``list[str]`` and text prompts.
    """

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        """Lists of one element per trajectory, by name."""
        takes, task, count = call.takes, call.task, len(call.trajectories)
        plain = _is_list_of_str(takes["completions"].annotation) or isinstance(
            task.extra.get("prompt"), str
        )
        texts = (
            "".join(part if isinstance(part, str) else "<image>" for part in m.parts)
            for m in task.messages
        )
        messages = [
            {"role": m.role, "content": text} for m, text in zip(task.messages, texts, strict=True)
        ]
        columns = {"ground_truth": task.ground_truth, "data_source": task.source}
        columns |= {
            k: value
            for k, value in task.extra.items()
            if isinstance(k, str) and k not in ("prompt", "completion")
        }
        columns |= {
            name: task.ground_truth for name in TRUTHS if name in takes and name not in columns
        }
        return {
            **{name: [value] * count for name, value in columns.items()},
            "prompts": ["\n".join(m["content"] for m in messages) if plain else messages] * count,
            "completions": [
                (
                    "\n".join(context.texts)
                    if plain
                    else [{"role": "assistant", "content": text} for text in context.texts]
                )
                for context in call.contexts
            ],
            "completion_ids": [
                [id for turn in t.sampled_turns for id in turn.token_ids] for t in call.trajectories
            ],
            "trainer_state": TrainerState(call.contexts[0].step),
            "log_metric": None,
            "log_extra": lambda name, values: None,
        }

    def outcome(self, result: Any, components: dict[str, Any]) -> Any:
        """The outcome in a list of one number."""
        values = elements(result, 2) or []
        if len(values) != 1:
            why = (
                f"the reward function returned {short(result, 200)} for one completion, not a list"
                " of one number"
            )
            return Unscored(UnscoredKind.INVALID_REWARD, why, why)
        return self._one(values[0], components)

    def outcomes(self, result: Any, count: int, components: dict[str, Any]) -> Any:
        """One outcome per number."""
        values = elements(result, count + 1)
        return result if values is None else [self._one(value, components) for value in values]

    def _one(self, value: Any, components: dict[str, Any]) -> Scored | Unscored:
        """None means in TRL that the function does not apply to this row: there is no reward, and
        no failure.
        """
        if value is None:
            return Unscored(
                UnscoredKind.NOT_APPLICABLE, "the reward function returned None for this row"
            )
        return Scored(value, components)


class VerlForm(FunctionForm):
    """verl's form. ``solution_str`` is the text of all sampled turns."""

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        """The four parameters of verl's ``custom_reward_function``."""
        task = call.task
        return {
            "data_source": task.source,
            "solution_str": "\n".join(call.contexts[0].texts),
            "ground_truth": task.ground_truth,
            "extra_info": task.extra.get("extra_info") or task.extra,
        }

    def outcome(self, result: Any, components: dict[str, Any]) -> Any:
        """The outcome in a number, or in a dict with ``score`` and components."""
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            reason = (
                "the reward function returned a dict without score; its keys are"
                f" {', '.join(map(str, result)) or 'none'}"
            )
            return Unscored(UnscoredKind.INVALID_REWARD, reason, reason)
        rest: dict[str, Any] = {
            str(name): value
            for name, value in result.items()
            if name != "score" and isinstance(value, Number)
        }
        return Scored(result["score"], rest)


def as_source(source: Any, use: str, per: Per = "trajectory") -> RewardSource | GroupRewardSource:
    """The source itself, or a function of one of the forms as a source.

    Raises ConfigError that names the expected forms.
    """
    if hasattr(source, METHODS[per]):
        return source
    own, form = (OWN, FunctionForm) if per == "trajectory" else (GROUP, GroupForm)
    takes = inspect.signature(source).parameters
    if "completions" in takes:
        return FunctionReward(source, TrlForm())
    if "solution_str" in takes and per == "trajectory":
        return FunctionReward(source, VerlForm())
    if set(own) & set(takes) and set(_required(takes)) <= set(own):
        return FunctionReward(source, form())
    raise ConfigError(_no_reward(use, takes, per))


def around(source: Any) -> tuple[type[BaseException], ...]:
    """The exceptions of a source that are failures of the infrastructure.

    Raises ConfigError for an unusable ``infrastructure``.
    """
    declared = getattr(source, "infrastructure", False)
    if isinstance(declared, bool):
        return (Exception,) if declared else UNAVAILABLE
    types = declared if isinstance(declared, tuple) else (declared,)
    if not all(isinstance(one, type) and issubclass(one, BaseException) for one in types):
        raise ConfigError(
            f"infrastructure must be True or a tuple of exception types, not {declared!r:.200}"
        )
    return (*UNAVAILABLE, *types)


def _no_reward(use: str, takes: Mapping[str, inspect.Parameter], per: Per) -> str:
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    shown = [stars.get(p.kind, "") + name for name, p in takes.items()]
    remedy = _HIDDEN if any(p.kind is p.VAR_KEYWORD for p in takes.values()) else ""
    if per == "group":
        return (
            f"use: {use!r} is a function of ({', '.join(shown)}), which is no reward with per:"
            " group. Write score_group(trajectories, task, contexts), or TRL's f(prompts,"
            f" completions, **kwargs){remedy}"
        )
    if "trajectories" in takes:
        remedy = ". A function of all trajectories of a group needs reward.per: group"
    return (
        f"use: {use!r} is a function of ({', '.join(shown)}), which is no reward. Write "
        "score(trajectory, task, context), or TRL's f(prompts, completions, **kwargs), or "
        f"verl's f(data_source, solution_str, ground_truth, extra_info){remedy}"
    )


_HIDDEN = (
    ". The form is known by the names of the parameters: write those that are used before **kwargs;"
    " a decorator that hides them needs functools.wraps(function) on its wrapper"
)


def _required(takes: Mapping[str, inspect.Parameter]) -> list[str]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, p in takes.items() if p.default is p.empty and p.kind not in variable]


def _is_list_of_str(annotation: Any) -> bool:
    written = annotation if isinstance(annotation, str) else str(annotation)
    return written.lower().replace("typing.", "").replace(" ", "") == "list[str]"
