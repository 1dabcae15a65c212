"""Plain functions as rewards: rayloop's own form, TRL's and verl's, told apart by the names of their parameters.

- ``score(trajectory, task, context)``: as ``RewardSource.score``.
- TRL (GRPOTrainer's ``reward_funcs``): ``f(completions, ...)`` returns one number or None per completion. It is called with one
  trajectory, by keyword, with lists of length 1: ``prompts``, ``completions``, ``completion_ids`` and every column of the row;
  beside them ``trainer_state`` (``global_step`` only), ``log_metric`` (its values become components), ``log_extra`` (ignored).
- verl (``custom_reward_function``): ``f(data_source, solution_str, ground_truth, extra_info)`` returns a number, or a dict whose
  ``score`` is the reward and whose other numbers become components.

All may be coroutine functions. A parameter that nothing fills and that has no default is an error of the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Number
from typing import Any

from rayloop.core.failures import ConfigError
from rayloop.core.groups import Scored, Unscored, UnscoredKind
from rayloop.core.protocols import RewardSource, ScoreContext
from rayloop.core.types import ImageSource, Task, Trajectory
from rayloop.data.dataset import TRUTHS

OWN = ("trajectory", "task", "context")


class FunctionReward:
    """A function as a reward source. ``arguments`` makes its keyword arguments, ``outcome`` an outcome of its result."""

    def __init__(self, function: Callable[..., Any], form: Form) -> None:
        self._function, self._form = function, form
        self._takes = inspect.signature(function).parameters

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Any:
        offered, components = self._form.arguments(self._takes, trajectory, task, context), dict[str, Any]()
        if "log_metric" in offered:
            offered["log_metric"] = components.__setitem__
        result = self._function(**self._chosen(offered))
        if inspect.isawaitable(result):
            return self._later(result, components)
        return self._form.outcome(result, components)

    async def _later(self, result: Any, components: dict[str, Any]) -> Any:
        return self._form.outcome(await result, components)

    def _chosen(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """What the function takes of what is offered. Raises TypeError that names what it lacks."""
        if any(p.kind is p.VAR_KEYWORD for p in self._takes.values()):
            chosen = dict(offered)
        else:
            chosen = {name: value for name, value in offered.items() if name in self._takes}
        lacks = [name for name in _required(self._takes) if name not in chosen]
        if lacks:
            known = ", ".join(sorted(offered))
            raise TypeError(
                f"the reward function wants {', '.join(lacks)}, and the row has no such column; offered are {known}"
            )
        return chosen


class Form:
    """One library's way to write a reward function. ``arguments`` offers more than most functions take."""

    def arguments(
        self, takes: Mapping[str, inspect.Parameter], trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> dict[str, Any]:
        return {"trajectory": trajectory, "task": task, "context": context}

    def outcome(self, result: Any, components: dict[str, Any]) -> Any:
        return result


@dataclass(frozen=True)
class TrainerState:
    """What there is of TRL's ``trainer_state``: the reward actor does not know how long the run is."""

    global_step: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has no {name} here: of TRL's there is global_step only")


class TrlForm(Form):
    """``completions`` is [[{"role": "assistant", "content": text}, ...]], one message per sampled turn; [text] when the row's
    ``prompt`` is a text, or the parameter is annotated as ``list[str]``."""

    def arguments(
        self, takes: Mapping[str, inspect.Parameter], trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> dict[str, Any]:
        plain = _is_list_of_str(takes["completions"].annotation) or isinstance(task.extra.get("prompt"), str)
        messages = [{"role": m.role, "content": "".join(map(_text, m.parts))} for m in task.messages]
        turns = [{"role": "assistant", "content": text} for text in context.texts]
        ids = [token for turn in trajectory.sampled_turns for token in turn.token_ids]
        columns = {**_columns(task), **_truths(takes, task)}
        return {
            **{name: [value] for name, value in columns.items()},
            "prompts": ["\n".join(m["content"] for m in messages) if plain else messages],
            "completions": ["\n".join(context.texts) if plain else turns],
            "completion_ids": [ids],
            "trainer_state": TrainerState(context.step),
            "log_metric": None,
            "log_extra": lambda name, values: None,
        }

    def outcome(self, result: Any, components: dict[str, Any]) -> Any:
        """None of TRL means that the function does not apply to this row: no reward, and no failure."""
        values = _first_two(result)
        if len(values) != 1:
            kind = UnscoredKind.INVALID_REWARD
            return Unscored(
                kind, f"the reward function returned {result!r:.200} for one completion, not a list of one number"
            )
        if values[0] is None:
            return Unscored(UnscoredKind.NOT_APPLICABLE, "the reward function returned None for this row")
        return Scored(values[0], components)


class VerlForm(Form):
    """``solution_str`` is the text of all sampled turns."""

    def arguments(
        self, takes: Mapping[str, inspect.Parameter], trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> dict[str, Any]:
        return {
            "data_source": task.source,
            "solution_str": "\n".join(context.texts),
            "ground_truth": task.ground_truth,
            "extra_info": task.extra.get("extra_info") or task.extra,
        }

    def outcome(self, result: Any, components: dict[str, Any]) -> Any:
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            reason = f"the reward function returned a dict without score; its keys are {', '.join(map(str, result)) or 'none'}"
            return Unscored(UnscoredKind.INVALID_REWARD, reason)
        rest: dict[str, Any] = {
            str(name): value for name, value in result.items() if name != "score" and isinstance(value, Number)
        }
        return Scored(result["score"], rest)


def as_source(source: Any, use: str) -> RewardSource:
    """The reward source itself, or a function of one of the three forms as one. Raises ConfigError that says what is expected."""
    if hasattr(source, "score"):
        return source
    takes = inspect.signature(source).parameters
    if "completions" in takes:
        return FunctionReward(source, TrlForm())
    if "solution_str" in takes:
        return FunctionReward(source, VerlForm())
    if set(OWN) & set(takes) and set(_required(takes)) <= set(OWN):
        return FunctionReward(source, Form())
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = [stars.get(p.kind, "") + name for name, p in takes.items()]
    remedy = _HIDDEN if any(p.kind is p.VAR_KEYWORD for p in takes.values()) else ""
    raise ConfigError(
        f"use: {use!r} is a function of ({', '.join(shown)}), which is no reward. Write "
        "score(trajectory, task, context), or TRL's f(prompts, completions, **kwargs), or "
        f"verl's f(data_source, solution_str, ground_truth, extra_info){remedy}"
    )


_HIDDEN = (
    ". The form is known by the names of the parameters: write those that are used before **kwargs; a decorator that hides them "
    "needs functools.wraps(function) on its wrapper"
)


def _first_two(result: Any) -> list[Any]:
    """Of a list, an array, a tensor or a generator; nothing of what is no such thing."""
    if (
        not isinstance(result, Iterable)
        or isinstance(result, str | bytes | Mapping)
        or getattr(result, "shape", None) == ()
    ):
        return []
    return list(islice(result, 2))


def _required(takes: Mapping[str, inspect.Parameter]) -> list[str]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, p in takes.items() if p.default is p.empty and p.kind not in variable]


def _columns(task: Task) -> dict[str, Any]:
    """The row's columns as far as the reader kept them, without those that the call itself has."""
    return {"ground_truth": task.ground_truth, "data_source": task.source} | {
        name: value
        for name, value in task.extra.items()
        if isinstance(name, str) and name not in ("prompt", "completion")
    }


def _truths(takes: Mapping[str, inspect.Parameter], task: Task) -> dict[str, Any]:
    """The ground truth under the usual name that the function asks for, when the row has no column of that name."""
    columns = _columns(task)
    return {name: task.ground_truth for name in TRUTHS if name in takes and name not in columns}


def _text(part: str | ImageSource) -> str:
    return part if isinstance(part, str) else "<image>"


def _is_list_of_str(annotation: Any) -> bool:
    written = annotation if isinstance(annotation, str) else str(annotation)
    return written.lower().replace("typing.", "").replace(" ", "") == "list[str]"
