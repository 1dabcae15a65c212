"""Rules for the vectors of PyVision-RL and DeepEyes: verifiers, trajectory reward, what the
environment pays and refuses.

They ask the rewards as a run does, with ``variant: original``, the published function's name, and a
judge that gives the vector's reply: what differs is a mismatch.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Outcome, Scored, Unscored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Message, Sampling, Task, Trajectory, TrajectoryId
from rayloop.envs.interpreter import text as interpreter
from rayloop.envs.interpreter.environment import PythonInterpreter
from rayloop.recipes.pyvision import original
from rayloop.recipes.pyvision.deepeyes import DeepEyesReward
from rayloop.recipes.pyvision.reward import PyVisionReward
from tests.vector_rules.entries import Deviation, Entry, Refused, Rule, Unknown

FAILURE = re.compile(r"(?P<name>[\w.]*(?:Error|Exception|Timeout))\(")
"""How a vector writes that the call of the judge raised."""
OWN_WORDS = (
    "what the policy is shown of its code's failure has our environment's words, not the original's"
)
LONG = "x" * original.LONG_ANSWER_CHARACTERS


class JudgeFailed(Exception):
    """The stub's judge cannot be reached."""


class Replying:
    """A judge that gives one reply, read as the original reads it."""

    class Settings(SettingsModel):
        reply: str
        """What the judge says, or the error that asking it raises."""
        read: Literal["digit", "grade"] = "digit"
        """Which of the original's two ways of reading it."""

    def __init__(self, settings: Replying.Settings) -> None:
        self._settings = settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        if FAILURE.match(self._settings.reply):
            raise JudgeFailed(self._settings.reply)
        read = original.verdict if self._settings.read == "digit" else original.grade
        return Scored(float(read(self._settings.reply)))


def _judge(reply: str, read: str = "digit") -> dict[str, Any]:
    return {"use": f"{__name__}:Replying", "with": {"reply": reply, "read": read}}


def _asked(reward: Any, response: str, task: Task, calls: int | None = None) -> Scored:
    """The reward of a transcript. Raises Refused where the original raised."""
    played = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE, calls)
    context = ScoreContext(0, [response], transcript=response)
    try:
        outcome = reward.score(played, task, context)
        if inspect.isawaitable(outcome):
            outcome = asyncio.run(_awaited(outcome))
    except JudgeFailed as error:
        raise Refused(str(error)) from error
    if isinstance(outcome, Unscored) or "raised" in outcome.flags:
        raise Refused(str(outcome))
    assert isinstance(outcome, Scored)
    return outcome


async def _awaited(outcome: Any) -> Any:
    return await outcome


def _reward(**settings: Any) -> PyVisionReward:
    return PyVisionReward(
        PyVisionReward.Settings.model_validate({"variant": "original", **settings})
    )


def _task(entry: Entry, source: str) -> Task:
    return Task("t", (Message("user", ("What is it?",)),), entry.need("ground_truth"), source)


def _verdict(scored: Scored) -> Mapping[str, Any]:
    return {
        "score": scored.components["accuracy"],
        "is_answer_right": scored.components["right"] == 1,
    }


def verifier(entry: Entry, file: Sequence[Entry]) -> Mapping[str, Any]:
    entry.only("response", "ground_truth", "judge_reply", "data_source", "response_build")
    published = entry.reward.partition(".")[0]
    judge = _judge(
        entry.need("judge_reply"), "grade" if published == "general_verifier" else "digit"
    )
    task = _task(entry, entry.inputs.get("data_source", ""))
    return _verdict(
        _asked(_reward(published=published, accuracy=judge), entry.need("response"), task)
    )


def relative_accuracy(entry: Entry, file: Sequence[Entry]) -> Mapping[str, Any]:
    entry.only("response", "ground_truth")
    return _verdict(_asked(_reward(), entry.need("response"), _task(entry, "vsi_numerical")))


def answer(entry: Entry, file: Sequence[Entry]) -> str | None:
    entry.only("text")
    return original.answer(entry.need("text"))


def trajectory_reward(entry: Entry, file: Sequence[Entry]) -> float:
    """An answer that is right without an accuracy is one that is too long."""
    entry.only("acc", "is_answer_right", "tool_turns_executed")
    accuracy, right = entry.need("acc"), entry.need("is_answer_right")
    if accuracy not in (0, 1) or (accuracy and not right):
        raise Unknown(f"an accuracy of {accuracy} that is{'' if right else ' not'} right")
    response = f"<answer>\n\\boxed{{{LONG if right and not accuracy else 'blue'}}}\n</answer>"
    task = Task("t", (Message("user", ("What is it?",)),), "blue", "deepeyes")
    return _asked(
        _reward(accuracy=_judge(str(int(right)))), response, task, entry.need("tool_turns_executed")
    ).value


def deepeyes(entry: Entry, file: Sequence[Entry]) -> float:
    entry.only("response", "ground_truth", "judge_reply", "data_source")
    settings = {"variant": "original", "accuracy": _judge(entry.need("judge_reply"))}
    reward = DeepEyesReward(DeepEyesReward.Settings.model_validate(settings))
    return _asked(
        reward, entry.need("response"), _task(entry, entry.inputs.get("data_source", ""))
    ).value


def execute(entry: Entry, file: Sequence[Entry]) -> Any:
    """What the environment runs and pays. The words that it shows are ours."""
    entry.only("action", "sandbox")
    turn, sandbox = entry.need("action"), entry.inputs.get("sandbox")
    code = interpreter.code(turn)
    paid = original.step_reward(turn, code is not None, _reward()._settings.per_call)
    if interpreter.answer(turn) is not None:
        ended = PythonInterpreter(PythonInterpreter.Settings()).step(turn)  # it asks for no sandbox
        return {
            "obs": ended.observation or "",
            "reward": paid,
            "done": ended.done,
            "info": ended.info,
        }
    got: dict[str, Any] = {"reward": paid, "done": False}
    if "code_run" in entry.expected:
        return {"code_run": (code or "").strip()}
    if sandbox is None and code is None:
        got["info"] = {"error": "NO_CODE_NOR_ANSWER"}
    reported = {key: value for key, value in entry.expected.items() if key in got}
    return Deviation(got, OWN_WORDS, instead=reported)


def forbidden(entry: Entry, file: Sequence[Entry]) -> list[bool]:
    entry.only("code")
    code = entry.need("code")
    return [
        interpreter.forbidden(one, original.FORBIDDEN)
        for one in ([code] if isinstance(code, str) else code)
    ]


RULES: dict[str, Rule] = {
    r"^rule_match_verify\.compute_score_rule_mra$": relative_accuracy,
    r"^env\.extract_answer \(verifier\)$": answer,
    r"^(multi_task_verifier|general_verifier|vl_agent)\.compute_score$": verifier,
    r"^vl_agent\.compute_score \(0\.8acc": deepeyes,
    r"^trajectory reward = acc": trajectory_reward,
    r"^env\.execute$": execute,
    r"^env\.forbidden_call_filter$": forbidden,
}
