"""DeepEyes' reward.

It pays 0.8 for a right answer, 0.2 less for a broken form, and 1.2 more if the answer is right
after looking at an image again.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.judge.rules.plain import extract
from rayloop.recipes.pyvision import original
from rayloop.recipes.pyvision.data import answered
from rayloop.recipes.pyvision.reward import calls
from rayloop.recipes.pyvision.verifiers import Asked, Judged, Kind, Verifiers, at_once

JUDGE_ATTEMPTS = 8
"""Times that the original asks its judge about mathematics before it calls the answer wrong."""


class DeepEyesReward:
    """``0.8 accuracy + 0.2 format + 1.2 tool`` (Visual-Agent/DeepEyes at 6c5e796).

    For mathematics it is ``1.2 accuracy + 0.4 format``. ``format`` is -1 when tags are not in
    pairs, or the answer has 1,000 characters, else 0; ``tool`` is 1 when the answer is right and a
    tool showed an image. Components: ``accuracy``, ``format``, ``tool``, ``looked`` (an image was
    shown) and ``calls``. Flags: ``ill_formed``, ``unparsable``, and the flags of the verifier.
    """

    class Settings(SettingsModel):
        variant: Literal["corrected", "original"] = "corrected"
        """corrected: the last turn's answer, and images that a tool really gave.

        An episode has no reward where the judge fails. original: tags are looked for in the whole
        transcript, and a text without tags is judged as a whole; to repeat or ablate a run.
        """
        mathematics: tuple[str, ...] = ("thinklite_eureka",)
        """Data sources that are paid by the second formula.

        math-verify compares their answers before a judge is asked.
        """
        verifiers: dict[str, Kind] = {}
        """The rule of a data source, as in PyVisionReward.

        The default of sources of ``mathematics`` is math.
        """
        math_timeout: float = Field(5.0, gt=0)
        """Seconds for one comparison by math-verify; then the judge is asked.

        Raise it for long formulas.
        """
        accuracy: Annotated[Component, Role("reward source", ("score",))] | None = None
        """The reward source that judges the answer, such as ``rayloop.judge.reward:JudgeReward``.

        Without one, rules for short answers do.
        """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError when ``verifiers`` need math-verify and it is not installed.

        For ``mathematics`` the first such row raises it.
        """
        self._settings = settings
        kinds: Mapping[str, Kind] = {
            **dict.fromkeys(settings.mathematics, "math"),
            **settings.verifiers,
        }
        as_published = settings.variant == "original"
        self._verifiers = Verifiers(
            kinds,
            settings.accuracy,
            settings.math_timeout,
            settings.verifiers,
            confirm=not as_published,
        )
        self.infrastructure = self._verifiers.infrastructure
        self.transcript = settings.variant == "original"

    def score(
        self, trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> Outcome | Awaitable[Outcome]:
        """The reward of the formula of the task's source.

        Raises the judge's errors, and DataFailure for a task without the truth that its rule needs.
        """
        math = task.source in self._settings.mathematics
        reading = self._reading(trajectory, context, math)
        form_flags = () if reading.formed else ("ill_formed",)
        if reading.answer is None or (not reading.answer and not self.transcript):
            return self._paid(Scored(0.0, flags=("unparsable", *form_flags)), reading, math)
        judge_context = replace(context, texts=[answered(reading.answer)])
        asked = Asked(reading.answer, trajectory, task, judge_context)
        if math:
            return self._mathematics(asked, reading, form_flags)

        def paid(verdict: Judged) -> Outcome:
            return self._paid(_flagged(verdict, form_flags), reading, math)

        judge = self._verifiers.asked if self.transcript else self._verifiers.judged
        return at_once(judge(asked), paid)

    def _reading(
        self, trajectory: Trajectory, context: ScoreContext, math: bool
    ) -> original.DeepEyes:
        """The answer as the variant reads it, with the calls of the episode."""
        read = _original if self.transcript else _corrected
        return replace(read(trajectory, context, math), calls=calls(trajectory, context))

    async def _mathematics(
        self, asked: Asked, reading: original.DeepEyes, form_flags: tuple[str, ...]
    ) -> Outcome:
        """Compare with math-verify, then ask the judge.

        The original asks up to eight times; then the answer is wrong.
        """
        if self._verifiers.kind(asked.task.source) == "math":
            verdict: Judged = await self._verifiers.equivalent(asked)
        else:
            judged = self._verifiers.judged(asked)
            verdict = await judged if isinstance(judged, Awaitable) else judged
        if isinstance(verdict, Scored) and verdict.value < 1 and self._verifiers.has_judge:
            verdict = await self._ask_judge(asked)
        return self._paid(_flagged(verdict, form_flags), reading, True)

    async def _ask_judge(self, asked: Asked) -> Judged:
        """The judge's verdict, in the original after failures too, up to JUDGE_ATTEMPTS times."""
        for _ in range(JUDGE_ATTEMPTS if self.transcript else 1):
            try:
                judged = self._verifiers.asked(asked)
                verdict = await judged if isinstance(judged, Awaitable) else judged
            except Exception:
                if not self.transcript:
                    raise
                continue
            if isinstance(verdict, Scored) or not self.transcript:
                return verdict
        return Scored(0.0, flags=("judge_failed",))

    def _paid(self, judged: Judged, reading: original.DeepEyes, math: bool) -> Outcome:
        form = 0.0 if reading.formed else -1.0
        components = {"format": form, "looked": float(reading.looked), "calls": reading.calls}
        if not isinstance(judged, Scored):
            return replace(judged, components=components)
        accuracy = judged.value
        tool = float(reading.looked and accuracy > 0.5)
        value = 0.8 * accuracy + 0.2 * form + 1.2 * tool
        if math:
            value = 1.2 * accuracy + 0.4 * form
        components = {
            "accuracy": accuracy,
            "format": form,
            "tool": tool,
            "looked": float(reading.looked),
            "calls": reading.calls,
        }
        return Scored(value, components, judged.flags, reason=judged.reason)


def _original(trajectory: Trajectory, context: ScoreContext, math: bool) -> original.DeepEyes:
    """The answer in the whole transcript."""
    response = context.transcript if context.transcript is not None else "".join(context.texts)
    return original.deepeyes_math(response) if math else original.deepeyes(response)


def _corrected(trajectory: Trajectory, context: ScoreContext, math: bool) -> original.DeepEyes:
    """The last turn's answer, its form over all turns, and whether a tool gave an image."""
    text = context.texts[-1]
    looked = _looked(trajectory)
    answer = extract(text, "box" if math else "tagged_box")
    if answer is not None and len(answer) >= original.LONG_ANSWER_CHARACTERS:
        return original.DeepEyes(None, False, looked)
    thoughts_paired = all(turn.count("<think>") == turn.count("</think>") for turn in context.texts)
    after_thought = text.rpartition("</think>")[2]
    answers_paired = after_thought.count("<answer>") == after_thought.count("</answer>")
    has_box = answer is not None or not math
    return original.DeepEyes(answer, thoughts_paired and answers_paired and has_box, looked)


def _looked(trajectory: Trajectory) -> bool:
    """Whether the policy was shown an image after its first turn."""
    turns = trajectory.turns
    first = next((i for i, turn in enumerate(turns) if turn.sampled), len(turns))
    return any(turn.images for turn in turns[first:] if not turn.restart)


def _flagged(judged: Judged, form_flags: tuple[str, ...]) -> Judged:
    """The verdict with the flags of the answer's form."""
    if not form_flags or not isinstance(judged, Scored):
        return judged
    return replace(judged, flags=(*judged.flags, *form_flags))
