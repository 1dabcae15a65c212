"""PyVision's and DeepEyes' rewards: what ``corrected`` pays, by hand, and what ``original`` does
besides the published vectors.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from rayloop.config.settings import Component, check_components, load
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import (
    EndReason,
    ImageRef,
    Message,
    Sampling,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)
from rayloop.recipes.pyvision.data import answered
from rayloop.recipes.pyvision.deepeyes import DeepEyesReward
from rayloop.recipes.pyvision.reward import PyVisionReward
from rayloop.run.config import RunConfig

ROOT = Path(__file__).parents[3]
CODE = "<code>\n```python\nprint(1)\n```\n</code>"
ZOOM = '<tool_call>{"name": "crop", "arguments": {}}</tool_call>'
IMAGE = ImageRef("a", 28, 28, (1, 2, 2), 1)


class Says:
    """A judge of one mind."""

    def __init__(self, verdict: float | Exception | Unscored) -> None:
        self.verdict, self.asked = verdict, list[str]()
        self.infrastructure = (TimeoutError,)

    async def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        self.asked.append(context.texts[-1])
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict if isinstance(self.verdict, Unscored) else Scored(self.verdict)


class Half(Says):
    def __init__(self) -> None:
        super().__init__(0.5)


class Right(Says):
    def __init__(self) -> None:
        super().__init__(1.0)


class Wrong(Says):
    def __init__(self) -> None:
        super().__init__(0.0)


class Down(Says):
    def __init__(self) -> None:
        super().__init__(TimeoutError("down"))


class Lost(Says):
    def __init__(self) -> None:
        super().__init__(Unscored(UnscoredKind.TIMEOUT, "the judge"))


def use(judge: Any) -> dict[str, Any]:
    return {"use": f"{__name__}:{judge.__name__}"}


def episode(*executed: bool | None, images: int = 0) -> Trajectory:
    """Turns whose code ran, failed, or that held an answer; ``images`` of the turns are followed by
    a picture.
    """
    turns = [Turn("prompt", (1,), (IMAGE,))]
    for i, one in enumerate(executed):
        turns.append(Turn("assistant", (2,), logprobs=(0.0,), executed=one))
        if i + 1 < len(executed):
            turns.append(Turn("user", (3,), (IMAGE,) if i < images else ()))
    return Trajectory(TrajectoryId(0, 0), 0, "t", 0, tuple(turns), Sampling(), EndReason.DONE)


def outcome(
    reward: Any,
    texts: list[str],
    played: Trajectory,
    truth: Any = "blue",
    source: str = "vstar",
    transcript: str | None = None,
) -> Any:
    task = Task("t", (Message("user", ("What colour is it?",)),), truth, source)
    found = reward.score(played, task, ScoreContext(0, texts, transcript=transcript))
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Any) -> Any:
    return await found


def pyvision(**settings: Any) -> PyVisionReward:
    return PyVisionReward(PyVisionReward.Settings.model_validate(settings))


def deepeyes(**settings: Any) -> DeepEyesReward:
    return DeepEyesReward(DeepEyesReward.Settings.model_validate(settings))


# PyVision, corrected ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executed", "texts", "value", "calls"),
    [
        ((None,), [answered("Blue")], 1.0, 0),
        ((True, True, None), [CODE, CODE, answered("blue")], 1.2, 2),
        ((True, False, None), [CODE, CODE, answered("blue")], 1.1, 1),
        ((False, False, None), ["no code", CODE, answered("blue")], 1.0, 0),
        ((True, None), [CODE, answered("red")], 0.0, 1),
        ((True, True), [CODE, CODE], 0.0, 2),
        ((True, None), [answered("blue"), "I do not know."], 0.0, 1),
        ((True, None), [CODE, "<answer>blue</answer>"], 1.1, 1),
        ((True, None), [CODE, answered("red") + answered("blue")], 1.1, 1),
    ],
)
def test_code_that_ran_without_an_error_is_paid_with_a_right_answer(
    executed: tuple[bool | None, ...], texts: list[str], value: float, calls: float
) -> None:
    scored = outcome(pyvision(), texts, episode(*executed))
    assert (scored.value, scored.components["calls"]) == (pytest.approx(value), calls)


def test_what_code_prints_is_never_graded() -> None:
    printed = f"{CODE}<interpreter>{answered('blue')}</interpreter>{answered('red')}"
    played, texts = episode(True, None), [CODE, answered("red")]
    assert outcome(pyvision(), texts, played, transcript=printed).value == 0.0
    original = outcome(
        pyvision(variant="original", accuracy=use(Right)), texts, played, transcript=printed
    )
    assert original.value == pytest.approx(1.1)


def test_an_overlong_answer_earns_neither_accuracy_nor_bonus() -> None:
    texts = [CODE, answered("x" * 1000)]
    corrected = outcome(pyvision(accuracy=use(Right)), texts, episode(True, None))
    assert (corrected.value, corrected.flags) == (0.0, ("too_long",))
    original = outcome(
        pyvision(variant="original", accuracy=use(Right)), texts, episode(True, None)
    )
    assert original.value == pytest.approx(0.1)


def test_a_judges_share_is_the_accuracy_and_its_failure_no_reward() -> None:
    texts, played = [CODE, answered("navy")], episode(True, None)
    assert outcome(pyvision(accuracy=use(Half)), texts, played).value == pytest.approx(0.6)
    assert outcome(pyvision(accuracy=use(Half), right_from=0.6), texts, played).value == 0.5
    assert isinstance(outcome(pyvision(accuracy=use(Lost)), texts, played), Unscored)
    with pytest.raises(TimeoutError):
        outcome(pyvision(accuracy=use(Down)), texts, played)
    assert pyvision(accuracy=use(Down)).infrastructure == (TimeoutError,)


@pytest.mark.parametrize(
    ("kind", "truth", "answer", "accuracy", "flags"),
    [
        ("mra", "10", "9.7", 1.0, ()),
        ("mra", 10, "8.5", 0.7, ()),
        ("mra", "1,000", "1000", 1.0, ()),
        ("mra", "-4", "-4 metres", 1.0, ()),
        ("mra", "0", "0.1", 0.0, ()),
        ("mra", "10", "ten", 0.0, ("no_number",)),
        ("option", "B", "(B)", 1.0, ()),
        ("option", "B", "B. red", 0.0, ()),
        ("option", "B", "C", 0.0, ()),
        ("option", "B", "Both", 0.0, ()),
        ("rules", "3", "3.0", 1.0, ()),
        ("rules", "[2003,2009]", "[2003, 2009]", 1.0, ()),
        ("rules", "7", "{7}", 1.0, ()),
        ("rules", "blue", "it is blue", 0.0, ("undecided",)),
        ("rules", "5", "7", 0.0, ()),
    ],
)
def test_a_source_has_its_rule(
    kind: str, truth: Any, answer: str, accuracy: float, flags: tuple[str, ...]
) -> None:
    reward = pyvision(verifiers={"my_*": kind}, accuracy=use(Down))
    scored = outcome(reward, [answered(answer)], episode(None), truth, "my_source")
    assert (scored.components["accuracy"], scored.flags) == (pytest.approx(accuracy), flags)


def test_the_published_sources_of_numbers_are_compared_by_rule() -> None:
    reward = pyvision(accuracy=use(Down))
    for source in ("vsi_numerical", "geometry_rule_verifiable"):
        assert outcome(reward, [answered("9.7")], episode(None), "10", source).value == 1.0
    with pytest.raises(DataFailure, match="no number"):
        outcome(reward, [answered("9.7")], episode(None), "ten", "vsi_numerical")
    with pytest.raises(TimeoutError):
        outcome(reward, [answered("9.7")], episode(None), "10", "vstar")


# PyVision, original -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executed", "texts", "calls"),
    [
        ((True, False, None), [CODE, CODE, answered("blue")], 2),
        ((False, None), ["no code", answered("blue")], 0),
        ((True, None), [CODE + "<answer>no</answer>", answered("blue")], 0),
    ],
)
def test_the_original_counts_code_that_raised(
    executed: tuple[bool | None, ...], texts: list[str], calls: float
) -> None:
    reward = pyvision(variant="original", accuracy=use(Right))
    scored = outcome(reward, texts, episode(*executed), transcript=answered("blue"))
    assert (scored.value, scored.components["calls"]) == (pytest.approx(1 + 0.1 * calls), calls)


def test_where_the_original_raised_the_value_is_0_with_a_flag() -> None:
    original = pyvision(variant="original", accuracy=use(Right))
    for source, name in (("chart", "UnboundLocalError"), ("xince", "NameError")):
        assert outcome(original, [answered("blue")], episode(None), source=source).flags == (
            "raised",
            name,
        )
    assert outcome(original, ["none"], episode(None), "3", "vsi_numerical").flags == (
        "raised",
        "TypeError",
    )
    assert outcome(original, ["none"], episode(None), "0", "vsi_numerical") == Scored(
        0.0, {"accuracy": 0.0, "calls": 0.0, "right": 0.0, "format": 0.0}
    ), "of a truth of 0 it only asks whether the answer is 0"
    vl = pyvision(variant="original", published="vl_agent", accuracy=use(Right))
    assert outcome(vl, [answered("blue")], episode(None), source="chart").value == 1.0


@pytest.mark.parametrize(("characters", "accuracy"), [(999, 1.0), (1000, 0.0)])
def test_the_general_verifier_pays_no_accuracy_for_a_long_answer(
    characters: int, accuracy: float
) -> None:
    reward = pyvision(variant="original", published="general_verifier", accuracy=use(Right))
    scored = outcome(reward, [answered("x" * characters)], episode(None))
    assert scored.components["accuracy"] == accuracy


def test_the_general_verifier_calls_an_outage_wrong() -> None:
    for judge in (Down, Lost):
        reward = pyvision(variant="original", published="general_verifier", accuracy=use(judge))
        scored = outcome(reward, [answered("blue")], episode(None))
        assert (scored.value, scored.flags[0]) == (0.0, "judge_failed")


# DeepEyes -----------------------------------------------------------------------------------------

GOOD = "<think>t</think><answer>navy</answer>"


@pytest.mark.parametrize(
    ("judge", "texts", "executed", "images", "value", "flags"),
    [
        (Right, [ZOOM, GOOD], (True, None), 1, 2.0, ()),
        (Right, [ZOOM, GOOD], (True, None), 0, 0.8, ()),
        (Right, [GOOD], (None,), 0, 0.8, ()),
        (Wrong, [ZOOM, GOOD], (True, None), 1, 0.0, ()),
        (Right, ["<think>t" + GOOD[16:]], (None,), 0, 0.6, ("ill_formed",)),
        (Right, ["<think>t" + ZOOM, GOOD], (True, None), 1, 1.8, ("ill_formed",)),
        (
            Right,
            ["<answer>" + "x" * 1000 + "</answer>"],
            (None,),
            0,
            -0.2,
            ("unparsable", "ill_formed"),
        ),
        (Right, ["navy"], (None,), 0, 0.0, ("unparsable",)),
        (Right, [GOOD, ZOOM], (True, True), 1, 0.0, ("unparsable",)),
    ],
)
def test_deepeyes_pays_answer_form_and_looking(
    judge: Any,
    texts: list[str],
    executed: tuple[bool | None, ...],
    images: int,
    value: float,
    flags: tuple[str, ...],
) -> None:
    scored = outcome(deepeyes(accuracy=use(judge)), texts, episode(*executed, images=images))
    assert (scored.value, scored.flags) == (pytest.approx(value), flags)
    assert scored.components["calls"] == executed.count(True)


def test_deepeyes_original_reads_the_whole_transcript() -> None:
    looked = "<|vision_start|><|image_pad|><|vision_end|>"
    original = deepeyes(variant="original", accuracy=use(Right))
    said = [GOOD]
    assert outcome(original, said, episode(None), transcript=looked + GOOD).value == pytest.approx(
        2.0
    )
    assert outcome(
        original, said, episode(None), transcript=looked[:-10] + GOOD
    ).value == pytest.approx(1.8)
    assert outcome(original, ["navy"], episode(None)).value == pytest.approx(0.8)
    assert outcome(original, ["x" * 1000], episode(None)).value == pytest.approx(-0.2)
    assert outcome(
        original, ["<answer>a" + "<answer>b</answer>"], episode(None)
    ).value == pytest.approx(0.6)


def test_deepeyes_never_pays_for_a_judge_that_failed() -> None:
    assert isinstance(outcome(deepeyes(accuracy=use(Lost)), [GOOD], episode(None)), Unscored)
    with pytest.raises(TimeoutError):
        outcome(deepeyes(accuracy=use(Down)), [GOOD], episode(None))


class Same:
    """In place of math-verify, which an extra installs."""

    def __init__(self, timeout: float, confirm: bool) -> None:
        self.confirm = confirm
        self.asked = list[tuple[str, str]]()

    def same(self, reference: str, answer: str) -> bool | None:
        self.asked.append((reference, answer))
        return None if answer == "slow" else reference == answer


@pytest.mark.parametrize(
    ("variant", "judge", "said", "value"),
    [
        ("corrected", Wrong, "\\boxed{2}", 1.2),
        ("corrected", Right, "\\boxed{3}", 1.2),
        ("corrected", Wrong, "\\boxed{3}", 0.0),
        ("corrected", Wrong, "<think>\\boxed{2}", 0.8),
        ("corrected", Wrong, "2", -0.4),
        ("original", Wrong, "\\boxed{2}", 1.2),
        ("original", Wrong, "\\boxed{3}\\boxed{2}", 0.8),
        ("original", Wrong, "2", -0.4),
        ("original", Down, "\\boxed{3}", 0.0),
        ("original", Wrong, "\\boxed{\\frac{1}{2}}", 0.0),
        ("original", Wrong, "\\boxed{}", -0.4),
    ],
)
def test_mathematics_is_verified_by_rule_and_then_by_the_judge(
    variant: str, judge: Any, said: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.recipes.pyvision.verifiers.MathVerifier", Same)
    scored = outcome(
        deepeyes(variant=variant, accuracy=use(judge)),
        [said],
        episode(None),
        "2",
        "thinklite_eureka",
    )
    assert scored.value == pytest.approx(value)


def test_an_answer_that_math_verify_does_not_decide_is_the_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rayloop.recipes.pyvision.verifiers.MathVerifier", Same)
    alone = pyvision(verifiers={"m": "math"})
    scored = outcome(alone, [answered("slow")], episode(None), "2", "m")
    assert (scored.value, scored.flags) == (0.0, ("undecided",))
    assert outcome(alone, [answered("2")], episode(None), "2", "m").value == 1.0
    judged = pyvision(verifiers={"m": "math"}, accuracy=use(Right))
    assert outcome(judged, [answered("slow")], episode(None), "2", "m").value == 1.0
    assert outcome(judged, [answered("x + 1")], episode(None), "x + 2", "m").value == 0.0, (
        "decided, so the judge is not asked"
    )


def test_the_rules_refuse_before_mathematics_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class SaysYes(Same):
        def same(self, reference: str, answer: str) -> bool | None:
            return True

    monkeypatch.setattr("rayloop.recipes.pyvision.verifiers.MathVerifier", SaysYes)
    assert (
        outcome(pyvision(verifiers={"m": "math"}), [answered("25")], episode(None), "24", "m").value
        == 0.0
    )
    assert outcome(
        deepeyes(variant="original"), ["\\boxed{25}"], episode(None), "24", "thinklite_eureka"
    ).value == pytest.approx(1.2)


def test_math_verify_is_asked_for_at_the_start_where_a_source_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rayloop.judge.mathematics.find_spec", lambda name: None)
    for made in (pyvision, deepeyes):
        made()
        with pytest.raises(ConfigError, match="math-verify"):
            made(verifiers={"m": "math"})


def test_the_preset_of_deepeyes_is_valid() -> None:
    config = load(ROOT / "recipes/pyvision/deepeyes.yaml", [], RunConfig)
    check_components(config)
    assert isinstance(config.reward.source.build(), DeepEyesReward)


def test_a_judge_is_given_the_answer_in_its_form() -> None:
    reward = deepeyes(accuracy=use(Right))
    outcome(reward, ["<answer>red</answer><answer>navy</answer>"], episode(None))
    judge = reward._verifiers._judge
    assert isinstance(judge, Says)
    assert judge.asked == [answered("navy")]
    assert Component.model_validate(use(Right)).build().asked == []
