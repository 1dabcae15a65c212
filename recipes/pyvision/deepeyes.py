"""DeepEyes' reward: 0.8 for a right answer, 0.2 less for a broken form, 1.2 more if it is right
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

ATTEMPTS = 8
"""Times that the original asks its judge about mathematics before it calls the answer wrong."""


class DeepEyesReward:
    """``0.8 accuracy + 0.2 format + 1.2 tool`` (Visual-Agent/DeepEyes at 6c5e796); of mathematics
    ``1.2 accuracy + 0.4 format``. ``format`` is -1 when tags are not in pairs, or the answer has
    1,000 characters, else 0; ``tool`` is 1 when the answer is right and a tool showed an image.
    Components: ``accuracy``, ``format``, ``tool``, ``looked`` (an image was shown) and ``calls``.
    Flags: ``ill_formed``, ``unparsable``, ``too_long``, and those of the verifier.
    """

    class Settings(SettingsModel):
        variant: Literal["corrected", "original"] = "corrected"
        """corrected: the last turn's answer, images that a tool really gave, and no reward where
        the judge fails. original: tags are looked for in the whole transcript, and a text without
        tags is judged as a whole; to repeat or ablate a run.
        """
        mathematics: tuple[str, ...] = ("thinklite_eureka",)
        """Data sources that are paid by the second formula, and whose answers math-verify compares
        before a judge is asked.
        """
        verifiers: dict[str, Kind] = {}
        """Which rule judges a data source, as in PyVisionReward; the default of sources of
        ``mathematics`` is math.
        """
        math_timeout: float = Field(5.0, gt=0)
        """Seconds for one comparison by math-verify; then the judge is asked.

        Raise it for long formulas.
        """
        accuracy: Annotated[Component, Role("reward source", ("score",))] | None = None
        """The reward source that judges the answer, such as ``rayloop.judge.reward:JudgeReward``;
        else rules for short answers.
        """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError when math-verify is asked for and not installed; of ``mathematics``
        the first such row does.
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
        """Raises what the judge raises, and DataFailure for a task without the truth that its rule
        needs.
        """
        math = task.source in self._settings.mathematics
        read = _original(context, math) if self.transcript else _read(trajectory, context, math)
        read = replace(read, calls=calls(trajectory, context))
        ill = () if read.formed else ("ill_formed",)
        if read.answer is None or (not read.answer and not self.transcript):
            return self._paid(Scored(0.0, flags=("unparsable", *ill)), read, math)
        asked = Asked(
            read.answer, trajectory, task, replace(context, texts=[answered(read.answer)])
        )
        if math:
            return self._mathematics(asked, read, ill)
        judged = self._verifiers.asked(asked) if self.transcript else self._verifiers.judged(asked)
        return at_once(judged, lambda found: self._paid(_flagged(found, ill), read, math))

    async def _mathematics(
        self, asked: Asked, read: original.DeepEyes, ill: tuple[str, ...]
    ) -> Outcome:
        """Compare with math-verify, then ask the judge.

        The original asks up to eight times; then the answer is wrong.
        """
        by_mathematics = self._verifiers.kind(asked.task.source) == "math"
        judged = (
            self._verifiers.equivalent(asked) if by_mathematics else self._verifiers.judged(asked)
        )
        found = await judged if isinstance(judged, Awaitable) else judged
        if isinstance(found, Scored) and found.value < 1 and self._verifiers.has_judge:
            found = await self._asked_again(asked)
        return self._paid(_flagged(found, ill), read, True)

    async def _asked_again(self, asked: Asked) -> Judged:
        for _ in range(ATTEMPTS if self.transcript else 1):
            try:
                judged = self._verifiers.asked(asked)
                found = await judged if isinstance(judged, Awaitable) else judged
            except Exception:
                if not self.transcript:
                    raise
                continue
            if isinstance(found, Scored) or not self.transcript:
                return found
        return Scored(0.0, flags=("judge_failed",))

    def _paid(self, found: Judged, read: original.DeepEyes, math: bool) -> Outcome:
        form = 0.0 if read.formed else -1.0
        if not isinstance(found, Scored):
            return replace(
                found,
                components={"format": form, "looked": float(read.looked), "calls": read.calls},
            )
        accuracy = found.value
        tool = float(read.looked and accuracy > 0.5)
        value = 1.2 * accuracy + 0.4 * form if math else 0.8 * accuracy + 0.2 * form + 1.2 * tool
        components = {
            "accuracy": accuracy,
            "format": form,
            "tool": tool,
            "looked": float(read.looked),
            "calls": read.calls,
        }
        return Scored(value, components, found.flags, reason=found.reason)


def _original(context: ScoreContext, math: bool) -> original.DeepEyes:
    response = context.transcript if context.transcript is not None else "".join(context.texts)
    return original.deepeyes_math(response) if math else original.deepeyes(response)


def _read(trajectory: Trajectory, context: ScoreContext, math: bool) -> original.DeepEyes:
    """The last turn's answer; its form over all turns of the policy; and whether a tool gave an
    image.
    """
    said = extract(context.texts[-1], "box" if math else "tagged_box")
    if said is not None and len(said) >= original.LONGEST:
        return original.DeepEyes(None, False, _looked(trajectory))
    paired = all(text.count("<think>") == text.count("</think>") for text in context.texts)
    last = context.texts[-1].rpartition("</think>")[2]
    paired = paired and last.count("<answer>") == last.count("</answer>")
    return original.DeepEyes(said, paired and (said is not None or not math), _looked(trajectory))


def _looked(trajectory: Trajectory) -> bool:
    """Whether the policy was shown an image after its first turn."""
    turns = trajectory.turns
    first = next((i for i, turn in enumerate(turns) if turn.sampled), len(turns))
    return any(turn.images for turn in turns[first:] if not turn.restart)


def _flagged(found: Judged, ill: tuple[str, ...]) -> Judged:
    return (
        replace(found, flags=(*found.flags, *ill)) if ill and isinstance(found, Scored) else found
    )
