"""Plain functions as rewards, in rayloop's own form, TRL's or verl's (docs/rewards.md).

The names of the parameters identify the form. All functions may be coroutine functions. A parameter
without a value and without a default is an error of the function.
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
    """The outcome of one result.

    The result is an Outcome, or a value that ``float`` makes a finite number (a bool, a tensor
    without dimensions). Anything else, texts included, is an invalid reward; invalid components are
    dropped and flagged ``invalid_component``.
    """
    if isinstance(result, Unscored):
        return result
    score = result if isinstance(result, Scored) else Scored(result)
    value = number(score.value)
    if value is None:
        reason = f"the reward source returned {short(score.value, 200)}, not a finite number"
        return Unscored(UnscoredKind.INVALID_REWARD, reason, reason)
    numbers = {str(name): number(component) for name, component in score.components.items()}
    components = {name: component for name, component in numbers.items() if component is not None}
    flags = [str(flag) for flag in score.flags]
    if len(components) < len(score.components):
        flags.append("invalid_component")
    return Scored(value, components, tuple(flags), reason=str(score.reason))


def number(value: Any) -> float | None:
    """``float(value)`` if that is finite, else None.

    Arrays and tensors must have no dimensions.
    """
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, str | bytes | bytearray) or getattr(value, "shape", ()) != ():
        return None
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


def as_outcomes(result: Any, count: int) -> list[Outcome]:
    """``as_outcome`` of each of ``count`` elements.

    Raises TypeError for a result without elements (or a generator, which would run here),
    ValueError for a different number of elements.
    """
    values = None if isinstance(result, Iterator) else elements(result, count + 1)
    if values is None:
        raise TypeError(
            f"a list of {count} outcomes was expected, one per trajectory, not {short(result, 200)}"
        )
    if len(values) != count:
        number_of_values = len(values) if len(values) < count else "more"
        raise ValueError(
            f"{count} outcomes were expected, one per trajectory, not {number_of_values}"
        )
    return [as_outcome(value) for value in values]


def elements(result: Any, most: int) -> list[Any] | None:
    """The first ``most`` elements of a list, an array, a tensor or a generator.

    None for any other value.
    """
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping | Set):
        return None
    # A tensor without dimensions is an Iterable by its class, but cannot be iterated.
    if getattr(result, "shape", None) == ():
        return None
    return list(islice(result, most))


Per = Literal["trajectory", "group"]
METHODS: dict[Per, str] = {"trajectory": "score", "group": "score_group"}
"""The method that a class must have, by ``reward.per``."""
_TRAJECTORY_PARAMETERS = ("trajectory", "task", "context")
_GROUP_PARAMETERS = ("trajectories", "task", "contexts")
UNAVAILABLE = (InfrastructureFailure, OSError, MemoryError)
"""Exceptions that are always failures of the infrastructure, whatever a grader declares."""


@dataclass(frozen=True)
class RewardCall:
    """One call of a reward function.

    ``takes``: the function's parameters. ``trajectories``: the trajectories to score.
    """

    takes: Mapping[str, inspect.Parameter]
    trajectories: Sequence[Trajectory]
    task: Task
    contexts: Sequence[ScoreContext]


class FunctionReward:
    """A function as a source.

    ``form`` makes the function's keyword arguments, and an outcome from its result.
    """

    def __init__(self, function: Callable[..., Any], form: "FunctionForm") -> None:
        self._function = function
        self._form = form
        self._takes = inspect.signature(function).parameters
        # A partial has the attributes of its function in ``func``.
        unwrapped = getattr(function, "func", function)
        self.infrastructure = getattr(unwrapped, "infrastructure", False)

    def _call(self, call: RewardCall, read: Callable[[Any, dict[str, Any]], Any]) -> Any:
        """Call the function and return ``read`` of its result, or an awaitable of that."""
        offered = self._form.arguments(call)
        components: dict[str, Any] = {}
        if "log_metric" in offered:
            offered["log_metric"] = components.__setitem__
        result = self._function(**self._arguments(offered))
        if not inspect.isawaitable(result):
            return read(result, components)

        async def read_later() -> Any:
            return read(await result, components)

        return read_later()

    def _arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """The offered arguments that the function takes.

        Raises TypeError that names the missing ones.
        """
        if _takes_any_keyword(self._takes):
            arguments = dict(offered)
        else:
            arguments = {name: value for name, value in offered.items() if name in self._takes}
        missing = [name for name in _required(self._takes) if name not in arguments]
        if missing:
            offered_names = ", ".join(sorted(offered))
            raise TypeError(
                f"the reward function wants {', '.join(missing)}, and the row has no such column;"
                f" offered are {offered_names}"
            )
        return arguments

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Any:
        """The outcome of one trajectory (``reward.per: trajectory``)."""
        call = RewardCall(self._takes, [trajectory], task, [context])
        return self._call(call, self._form.outcome)

    def score_group(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> Any:
        """The outcomes of a group, in order (``reward.per: group``)."""
        call = RewardCall(self._takes, trajectories, task, contexts)

        def read(result: Any, components: dict[str, Any]) -> Any:
            return self._form.outcomes(result, len(trajectories), components)

        return self._call(call, read)


class FunctionForm:
    """One library's form of a reward function; this class is rayloop's form, for one trajectory."""

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
    """Rayloop's own form, for a group."""

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        """The parameters of ``score_group``."""
        return {"trajectories": call.trajectories, "task": call.task, "contexts": call.contexts}


@dataclass(frozen=True)
class TrainerState:
    """The part of TRL's ``trainer_state`` that exists here.

    The reward actor does not know the length of the run.
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
        count = len(call.trajectories)
        messages = _trl_messages(call.task)
        prompt: Any = messages
        completions: list[Any]
        if self._wants_texts(call):
            prompt = "\n".join(message["content"] for message in messages)
            completions = ["\n".join(context.texts) for context in call.contexts]
        else:
            completions = [_assistant_messages(context.texts) for context in call.contexts]
        return {
            **{name: [value] * count for name, value in self._columns(call).items()},
            "prompts": [prompt] * count,
            "completions": completions,
            "completion_ids": [_sampled_ids(trajectory) for trajectory in call.trajectories],
            "trainer_state": TrainerState(call.contexts[0].step),
            "log_metric": None,
            "log_extra": lambda name, values: None,
        }

    def _wants_texts(self, call: RewardCall) -> bool:
        """Whether the function gets texts, and not lists of messages."""
        has_text_prompt = isinstance(call.task.extra.get("prompt"), str)
        return has_text_prompt or _is_list_of_str(call.takes["completions"].annotation)

    def _columns(self, call: RewardCall) -> dict[str, Any]:
        """The columns of the row, and the truth under each name that the function takes."""
        task = call.task
        columns = {"ground_truth": task.ground_truth, "data_source": task.source}
        for name, value in task.extra.items():
            if isinstance(name, str) and name not in ("prompt", "completion"):
                columns[name] = value
        for name in TRUTHS:
            if name in call.takes and name not in columns:
                columns[name] = task.ground_truth
        return columns

    def outcome(self, result: Any, components: dict[str, Any]) -> Any:
        """The outcome from a list of one number."""
        values = elements(result, 2) or []
        if len(values) != 1:
            reason = (
                f"the reward function returned {short(result, 200)} for one completion, not a list"
                " of one number"
            )
            return Unscored(UnscoredKind.INVALID_REWARD, reason, reason)
        return self._outcome_of(values[0], components)

    def outcomes(self, result: Any, count: int, components: dict[str, Any]) -> Any:
        """One outcome per number."""
        values = elements(result, count + 1)
        if values is None:
            return result
        return [self._outcome_of(value, components) for value in values]

    def _outcome_of(self, value: Any, components: dict[str, Any]) -> Scored | Unscored:
        # In TRL None means that the function does not apply to this row. That is not a failure.
        if value is None:
            return Unscored(
                UnscoredKind.NOT_APPLICABLE, "the reward function returned None for this row"
            )
        return Scored(value, components)


class VerlForm(FunctionForm):
    """The form of verl. ``solution_str`` is the text of all sampled turns."""

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
        """The outcome from a number, or from a dict with ``score`` and components."""
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "none"
            reason = f"the reward function returned a dict without score; its keys are {keys}"
            return Unscored(UnscoredKind.INVALID_REWARD, reason, reason)
        numbers: dict[str, Any] = {}
        for name, value in result.items():
            if name != "score" and isinstance(value, Number):
                numbers[str(name)] = value
        return Scored(result["score"], numbers)


def as_source(source: Any, use: str, per: Per = "trajectory") -> RewardSource | GroupRewardSource:
    """The source itself, or a function of one of the forms as a source.

    Raises ConfigError that names the expected forms.
    """
    if hasattr(source, METHODS[per]):
        return source
    takes = inspect.signature(source).parameters
    if "completions" in takes:
        return FunctionReward(source, TrlForm())
    if "solution_str" in takes and per == "trajectory":
        return FunctionReward(source, VerlForm())
    form = FunctionForm() if per == "trajectory" else GroupForm()
    parameters = set(_TRAJECTORY_PARAMETERS if per == "trajectory" else _GROUP_PARAMETERS)
    if parameters & set(takes) and set(_required(takes)) <= parameters:
        return FunctionReward(source, form)
    raise ConfigError(_unknown_form(use, takes, per))


def infrastructure_errors(source: Any) -> tuple[type[BaseException], ...]:
    """The exceptions of a source that are failures of the infrastructure.

    Raises ConfigError for an unusable ``infrastructure``.
    """
    declared = getattr(source, "infrastructure", False)
    if isinstance(declared, bool):
        return (Exception,) if declared else UNAVAILABLE
    types = declared if isinstance(declared, tuple) else (declared,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in types):
        raise ConfigError(
            f"infrastructure must be True or a tuple of exception types, not {declared!r:.200}"
        )
    return (*UNAVAILABLE, *types)


def _trl_messages(task: Task) -> list[dict[str, str]]:
    """The messages of a task with texts as contents."""
    messages = []
    for message in task.messages:
        texts = [part if isinstance(part, str) else "<image>" for part in message.parts]
        messages.append({"role": message.role, "content": "".join(texts)})
    return messages


def _assistant_messages(texts: Iterable[str]) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text} for text in texts]


def _sampled_ids(trajectory: Trajectory) -> list[int]:
    """The token ids of all sampled turns."""
    ids: list[int] = []
    for turn in trajectory.sampled_turns:
        ids += turn.token_ids
    return ids


def _unknown_form(use: str, takes: Mapping[str, inspect.Parameter], per: Per) -> str:
    """The message for a function of no known form."""
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    names = [stars.get(parameter.kind, "") + name for name, parameter in takes.items()]
    signature = ", ".join(names)
    remedy = _HIDDEN_NAMES_REMEDY if _takes_any_keyword(takes) else ""
    if per == "group":
        return (
            f"use: {use!r} is a function of ({signature}), which is not a reward with per: group."
            " Write score_group(trajectories, task, contexts), or TRL's f(prompts,"
            f" completions, **kwargs){remedy}"
        )
    if "trajectories" in takes:
        remedy = ". A function of all trajectories of a group needs reward.per: group"
    return (
        f"use: {use!r} is a function of ({signature}), which is not a reward. Write "
        "score(trajectory, task, context), or TRL's f(prompts, completions, **kwargs), or "
        f"verl's f(data_source, solution_str, ground_truth, extra_info){remedy}"
    )


_HIDDEN_NAMES_REMEDY = (
    ". The names of the parameters identify the form: write the used ones before **kwargs;"
    " a decorator that hides them needs functools.wraps(function) on its wrapper"
)


def _takes_any_keyword(takes: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())


def _required(takes: Mapping[str, inspect.Parameter]) -> list[str]:
    """The names of the parameters without a default."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name
        for name, parameter in takes.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]


def _is_list_of_str(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else str(annotation)
    return text.lower().replace("typing.", "").replace(" ", "") == "list[str]"
