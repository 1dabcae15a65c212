"""Arc Vision's reward, against values worked out from its formula, and its preset."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rayloop.config.settings import check_components, load
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import (
    EndReason,
    ImageRef,
    ImageSource,
    Message,
    Sampling,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)
from rayloop.recipes.arc_vision.data import Box, GroundingRows
from rayloop.recipes.arc_vision.reward import ArcVisionReward, EpisodeTexts, IoUReward
from rayloop.recipes.arc_vision.reward import arc_vision as formula
from rayloop.recipes.arc_vision.settings import ArcVisionWeights
from rayloop.run.config import RunConfig

ROOT = Path(__file__).parents[3]
DEFAULTS = ArcVisionReward.Settings()
EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)

SMALL: Box = (0.1, 0.1, 0.2, 0.2)
EDGE: Box = (0.0, 0.3, 0.4, 0.7)
LARGE: Box = (0.3, 0.3, 0.7, 0.7)
ZOOM, WAIT, LOOK = (
    f"<use_tool>{name}</use_tool>" for name in ("zoom_ui_element", "wait_for_ui", "inspect_element")
)
CROP = '<tool_call>{"name": "crop", "arguments": {"box": [0.0, 0.0, 0.5, 0.5]}}</tool_call>'


def arc_vision(
    texts: list[str], truth: Box, settings: ArcVisionReward.Settings, **played: Any
) -> Scored:
    return formula(EpisodeTexts(texts, **played), truth, settings)


def said(box: Box) -> str:
    return f"<bbox>{list(box)}</bbox>"


def half(box: Box) -> str:
    """An answer that is the left half of the box: IoU .5."""
    return said((box[0], box[1], round((box[0] + box[2]) / 2, 4), box[3]))


@pytest.mark.parametrize(
    ("text", "truth", "terms", "value", "flags"),
    [
        (said(SMALL), SMALL, (1, 0, 0), 0.6, ()),
        (ZOOM + said(SMALL), SMALL, (1, 0.4, 0), 0.72, ()),
        (CROP + said(SMALL), SMALL, (1, 0.4, 0), 0.72, ()),
        (WAIT + said(SMALL), SMALL, (1, 0.4, -0.05), 0.715, ("wrong_tool",)),
        (WAIT + CROP + said(SMALL), SMALL, (1, 0.4, 0), 0.72, ()),
        (WAIT + said(EDGE), EDGE, (1, 0.2, 0), 0.66, ()),
        (LOOK + said(LARGE), LARGE, (1, 0.1, 0), 0.63, ()),
        (said(LARGE), LARGE, (1, 0.1, 0), 0.63, ()),
        (said(EDGE), EDGE, (1, 0.1, 0), 0.63, ()),
        (half(LARGE), LARGE, (0.5, 0, 0), 0.3, ()),
        (ZOOM + half(SMALL), SMALL, (0.5, 0.2, 0), 0.36, ()),
        (said(LARGE), SMALL, (0, 0, -0.3), -0.03, ("missed_tool",)),
        ("I see nothing.", SMALL, (0, 0, -0.3), -0.03, ("missed_tool", "unparsable")),
        ("I see nothing.", LARGE, (0, 0, 0), 0.0, ("unparsable",)),
        ("<bbox>[30, 30, 70, 70]</bbox>", LARGE, (0, 0, 0), 0.0, ("unknown_size",)),
        (ZOOM * 2 + said(LARGE), LARGE, (1, 0.1, -0.25), 0.605, ("unneeded_tools",)),
        (ZOOM * 2 + said(EDGE), EDGE, (1, 0.2, 0), 0.66, ()),
        (ZOOM * 3 + said(SMALL), SMALL, (1, 0.4, -0.4), 0.68, ("excessive_tools",)),
        (
            ZOOM * 3 + said(SMALL),
            LARGE,
            (0, 0, -0.65),
            -0.065,
            ("unneeded_tools", "excessive_tools"),
        ),
        (WAIT, SMALL, (0, 0, 0), 0.0, ("tool_only",)),
        (ZOOM * 4, EDGE, (0, 0, 0), 0.0, ("tool_only",)),
        (CROP, LARGE, (0, 0, 0), 0.0, ("tool_only",)),
        (ZOOM + "<bbox>none</bbox>", SMALL, (0, 0, 0), 0.0, ("unparsable",)),
        ("<use_tool>zoom", LARGE, (0, 0, 0), 0.0, ("unparsable",)),
    ],
)
def test_the_formula(
    text: str, truth: Box, terms: tuple[float, ...], value: float, flags: tuple[str, ...]
) -> None:
    scored = arc_vision([text], truth, DEFAULTS)
    assert scored.value == pytest.approx(value, abs=1e-9)
    assert [scored.components[name] for name in ("r_task", "r_tool", "r_gate")] == pytest.approx(
        terms, abs=1e-9
    )
    assert scored.flags == flags


@pytest.mark.parametrize(
    ("truth", "small", "edge"),
    [
        (SMALL, 1, 0),
        (EDGE, 0, 1),
        (LARGE, 0, 0),
        ((0.0, 0.0, 0.1, 0.1), 1, 1),
        ((0.8, 0.8, 0.9, 0.91), 1, 1),
    ],
)
def test_components_say_what_was_asked_and_answered(truth: Box, small: float, edge: float) -> None:
    components = arc_vision([CROP + ZOOM + said(truth)], truth, DEFAULTS).components
    area = (truth[2] - truth[0]) * (truth[3] - truth[1])
    penalties = 0 if small or edge else 1
    expected = {
        "iou": 1,
        "click": 1,
        "format": 1,
        "asked": 2,
        "tools": 2,
        "known_tools": 2,
        "penalties": penalties,
        "area": area,
    }
    expected |= {"small": small, "edge": edge}
    assert {name: components[name] for name in expected} == pytest.approx(expected)
    assert set(components) == {*expected, "r_task", "r_tool", "r_gate"}


def test_calls_are_counted_over_all_turns_and_the_last_one_answers() -> None:
    scored = arc_vision([f"{said(LARGE)} {CROP}", said(SMALL)], SMALL, DEFAULTS)
    assert scored.value == pytest.approx(0.72)
    assert (scored.components["tools"], scored.flags) == (1.0, ())
    assert arc_vision([said(SMALL), CROP], SMALL, DEFAULTS).flags == ("tool_only",)


def test_only_the_configured_tags_are_calls() -> None:
    settings = ArcVisionReward.Settings(call_tags=("tool_call",))
    assert arc_vision([ZOOM + said(SMALL)], SMALL, settings).components["tools"] == 0
    assert arc_vision([CROP + said(SMALL)], SMALL, settings).components["tools"] == 1
    assert arc_vision(["<tool_call>crop</use_tool>"], SMALL, settings).components["tools"] == 0


@pytest.mark.parametrize(
    ("changes", "text", "truth", "value"),
    [
        ({"tool_only": 0.1}, ZOOM, SMALL, 0.1),
        ({"completion": {"penalty": 0.2, "after": 0}}, ZOOM, SMALL, -0.2),
        ({"weights": {"task": 1.0, "tool": 0.0, "gate": 0.0}}, ZOOM * 3 + half(LARGE), LARGE, 0.5),
        ({"small_area": 0.0}, ZOOM + said(SMALL), SMALL, 0.63),
        (
            {"edge_margin": 0.15},
            ZOOM + said(LARGE),
            (0.14, 0.3, 0.7, 0.7),
            0.6 * 4 / 5.6 + 0.3 * 0.2 * 4 / 5.6,
        ),
        ({"shares": {"small": 1.0, "most": 1.0}}, ZOOM + said(SMALL), SMALL, 0.9),
        ({"shares": {"most": 0.2}}, ZOOM + said(SMALL), SMALL, 0.66),
        ({"restraint": 0.5}, said(LARGE), LARGE, 0.75),
        ({"restraint_iou": 0.4}, half(LARGE), LARGE, 0.33),
        ({"penalties": {"missed": 1.0}}, said(LARGE), SMALL, -0.1),
        ({"penalties": {"missed_iou": 0.9}}, said((0.1, 0.1, 0.16, 0.2)), SMALL, 0.33),
        ({"penalties": {"unneeded": 0.0}}, ZOOM * 2 + said(LARGE), LARGE, 0.63),
        ({"max_tools": 0}, ZOOM + said(SMALL), SMALL, 0.68),
        ({"waiting": "zoom", "closer": ["inspect"]}, ZOOM + said(SMALL), SMALL, 0.715),
    ],
)
def test_every_number_is_a_setting(
    changes: dict[str, Any], text: str, truth: Box, value: float
) -> None:
    default = arc_vision([text], truth, DEFAULTS, step=1).value
    changed = ArcVisionReward.Settings.model_validate(changes)
    assert arc_vision([text], truth, changed, step=1).value == pytest.approx(value)
    assert default != pytest.approx(value)


@pytest.mark.parametrize("variant", ["original", "library"])
def test_a_variant_of_the_originals_takes_any_four_numbers_for_the_true_box(variant: str) -> None:
    reward = ArcVisionReward(ArcVisionReward.Settings.model_validate({"variant": variant}))
    for truth in ([0.5, 0.5, 0.5, 0.5], [576, 324, 1344, 756]):
        assert isinstance(
            reward.score(
                EMPTY_TRAJECTORY, Task("t", (), ground_truth=truth), ScoreContext(0, ["x"])
            ),
            Scored,
        )
    for truth in (None, [0.1, 0.2, 0.3], "abcd"):
        with pytest.raises(DataFailure, match="four numbers"):
            reward.score(
                EMPTY_TRAJECTORY, Task("t", (), ground_truth=truth), ScoreContext(0, ["x"])
            )


def test_the_originals_read_the_whole_episode_and_never_pay_what_is_no_number() -> None:
    original = ArcVisionReward.Settings(variant="original")
    assert arc_vision([said(LARGE), CROP], LARGE, original).value == pytest.approx(0.63)
    endless = original.model_copy(
        update={"weights": ArcVisionWeights.model_construct(task=float("inf"))}
    )
    assert arc_vision(["nothing"], LARGE, endless).value == -1.0


@pytest.mark.parametrize("answer", ["<box>0.1,0.1,0.2,0.2</box>", "x1,y1,x2,y2: 0.1,0.1,0.2,0.2"])
def test_calls_without_an_answer_have_no_overlap_even_where_the_original_could_read_a_box(
    answer: str,
) -> None:
    scored = arc_vision([ZOOM + answer], SMALL, ArcVisionReward.Settings(variant="original"))
    assert (scored.value, scored.flags) == (0.1, ("tool_only",))
    assert [scored.components[name] for name in ("iou", "click", "format")] == [0.0, 0.0, 0.0]


def test_a_fraction_may_have_as_many_digits_as_a_float_is_printed_with() -> None:
    scored = arc_vision(["<bbox>[0.30000000000000004,0.3,0.7,0.7]</bbox>"], LARGE, DEFAULTS)
    assert (scored.components["iou"], scored.flags) == (pytest.approx(1.0), ())


def test_the_library_takes_calls_beyond_two_from_the_tool_term() -> None:
    """0.3 (0.4 - 0.4 (n - 2)) for a small box that is found; without an answer there is no branch
    of its own.
    """
    library = ArcVisionReward.Settings(variant="library")
    rewards = [arc_vision([ZOOM * n + said(SMALL)], SMALL, library).value for n in (1, 2, 3, 5)]
    assert rewards == pytest.approx([0.72, 0.72, 0.6, 0.36])
    assert arc_vision([WAIT * 3], SMALL, library).value == pytest.approx(-0.12)
    assert arc_vision([WAIT + said(SMALL)], SMALL, library).value == pytest.approx(0.72)


TRUTHS = st.sampled_from([SMALL, EDGE, LARGE])
PARTS = st.lists(
    st.sampled_from(
        [ZOOM, WAIT, LOOK, CROP, said(SMALL), said(EDGE), said(LARGE), "<bbox>", "[1]", "text"]
    )
)


@given(parts=PARTS, truth=TRUTHS)
def test_the_reward_stays_in_its_reachable_range(parts: list[str], truth: Box) -> None:
    scored = arc_vision(["".join(parts)], truth, DEFAULTS)
    assert -0.065 - 1e-9 <= scored.value <= 0.72 + 1e-9
    assert scored.components["tools"] == sum(part in (ZOOM, WAIT, LOOK, CROP) for part in parts)


def test_both_rewards_measure_the_same_box() -> None:
    task = Task("t", (), ground_truth=list(LARGE))
    context = ScoreContext(0, [half(LARGE)])
    simple = IoUReward().score(EMPTY_TRAJECTORY, task, context)
    full = ArcVisionReward(DEFAULTS).score(EMPTY_TRAJECTORY, task, context)
    assert isinstance(simple, Scored)
    assert isinstance(full, Scored)
    assert simple.components == {name: full.components[name] for name in simple.components}
    assert simple.value == full.components["r_task"] == pytest.approx(0.5)


@pytest.mark.parametrize("reward", [IoUReward(), ArcVisionReward(DEFAULTS)])
@pytest.mark.parametrize("truth", [None, [30, 30, 70, 70], [0.2, 0.2, 0.2, 0.4]])
def test_a_broken_ground_truth_blames_the_data(
    reward: IoUReward | ArcVisionReward, truth: Any
) -> None:
    with pytest.raises(DataFailure, match="ground truth of task t"):
        reward.score(
            EMPTY_TRAJECTORY, Task("t", (), ground_truth=truth), ScoreContext(0, [said(LARGE)])
        )


# What ``corrected`` mends -------------------------------------------------------------------------

QWEN = '```json\n[{"bbox_2d": [384, 216, 896, 504], "label": "button"}]\n```'


@pytest.mark.parametrize(
    ("text", "size", "overlap", "flags"),
    [
        ("<bbox>[384, 216, 896, 504]</bbox>", (1280, 720), 1.0, ()),
        (QWEN, (1280, 720), 1.0, ()),
        (QWEN, (1920, 1080), 0.136612, ()),
        (QWEN, (640, 480), 0.0, ("unparsable",)),
        (QWEN, None, 0.0, ("unknown_size",)),
        ('{"bbox_2d": [0.3, 0.3, 0.7, 0.7]}', None, 1.0, ()),
        ("<bbox>[0.1, 0.1, 0.2, 0.2]</bbox>" + QWEN, (1280, 720), 1.0, ()),
        (QWEN + "<bbox>[0.3, 0.3, 0.7, 0.7]</bbox>", None, 1.0, ()),
        ('{"bbox_2d": [896, 504, 384, 216]}', (1280, 720), 0.0, ("unparsable",)),
    ],
)
def test_pixels_and_qwens_notation_are_read_with_the_size_of_the_image(
    text: str, size: Any, overlap: float, flags: tuple[str, ...]
) -> None:
    scored = arc_vision([text], LARGE, DEFAULTS, size=size)
    assert (scored.components["iou"], scored.flags) == (pytest.approx(overlap, abs=1e-5), flags)


def episode(*turns: Turn) -> Trajectory:
    """After a prompt with an image of 1000 x 500 pixels, which the model was shown as 560 x 280."""
    shown = Turn("prompt", (1,), (ImageRef("a", 1000, 500, (1, 20, 40), 200),))
    return replace(EMPTY_TRAJECTORY, turns=(shown, *turns))


def turn(executed: bool | None) -> Turn:
    return Turn("assistant", (2,), logprobs=(0.0,), executed=executed)


@pytest.mark.parametrize(
    ("pixels", "text"),
    [
        ("image", "<bbox>[300,150,700,350]</bbox>"),
        ("shown", "<bbox>[168,84,392,196]</bbox>"),
        ("thousandths", "<bbox>[300,300,700,700]</bbox>"),
    ],
)
def test_what_pixels_are_is_a_setting(pixels: str, text: str) -> None:
    reward = ArcVisionReward(ArcVisionReward.Settings.model_validate({"pixels": pixels}))
    scored = reward.score(episode(turn(None)), Task("t", (), LARGE), ScoreContext(0, [text]))
    assert isinstance(scored, Scored)
    assert scored.components["iou"] == pytest.approx(1)


def test_of_a_saved_completion_the_row_says_the_size() -> None:
    task = Task("t", (), LARGE, extra={"image_size": [1280, 720]})
    scored = ArcVisionReward(DEFAULTS).score(EMPTY_TRAJECTORY, task, ScoreContext(0, [QWEN]))
    assert isinstance(scored, Scored)
    assert scored.components["iou"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("first", "executed", "tools", "value"),
    [
        (CROP, True, 1, 0.72),
        (CROP, False, 0, 0.6),
        (CROP, None, 0, 0.6),
        (ZOOM + CROP, True, 1, 0.72),
        ("hm", True, 0, 0.6),
    ],
)
def test_tools_are_those_that_were_carried_out(
    first: str, executed: bool | None, tools: int, value: float
) -> None:
    reward = ArcVisionReward(DEFAULTS)
    played = episode(turn(executed), Turn("tool", (3,)), turn(None))
    scored = reward.score(played, Task("t", (), SMALL), ScoreContext(0, [first, said(SMALL)]))
    assert isinstance(scored, Scored)
    assert (scored.value, scored.components["tools"]) == (pytest.approx(value), tools)
    assert scored.components["asked"] == len(re.findall("<(?:use_tool|tool_call)>", first))


@pytest.mark.parametrize(("step", "share"), [(0, 1.0), (250, 0.75), (900, 0.1), (5000, 0.1)])
def test_what_tools_earn_fades(step: int, share: float) -> None:
    fading = ArcVisionReward.Settings.model_validate({"decay": {"steps": 1000}})
    assert arc_vision([ZOOM + said(SMALL)], SMALL, fading, step=step).value == pytest.approx(
        0.6 + 0.3 * 0.4 * share
    )


@pytest.mark.parametrize(
    ("step", "value", "flags"), [(50, 0.0, ("tool_only",)), (51, -0.2, ("tool_only", "incomplete"))]
)
def test_calls_without_a_box_cost_something_later(
    step: int, value: float, flags: tuple[str, ...]
) -> None:
    strict = ArcVisionReward.Settings.model_validate({"completion": {"penalty": 0.2}})
    scored = arc_vision([ZOOM], SMALL, strict, step=step)
    assert (scored.value, scored.flags) == (pytest.approx(value), flags)
    assert arc_vision([ZOOM + "<bbox>none</bbox>"], LARGE, strict, step=51).value == pytest.approx(
        -0.2
    )
    assert arc_vision([ZOOM + said(SMALL)], SMALL, strict, step=51).value == pytest.approx(0.72)


@pytest.mark.parametrize(
    ("said_of_itself", "confidence"),
    [
        ("0.9", 0.9),
        ("90%", 0.9),
        ("90", 0.9),
        ("1", 1.0),
        ("0.5%", 0.005),
        ("250", None),
        ("sure", None),
    ],
)
def test_confidence_is_logged_and_never_paid(said_of_itself: str, confidence: float | None) -> None:
    text = f"<confidence>{said_of_itself}</confidence>{said(LARGE)}"
    scored = arc_vision([text], LARGE, DEFAULTS)
    assert (scored.value, scored.components.get("confidence")) == (
        pytest.approx(0.63),
        pytest.approx(confidence),
    )
    assert scored.components.get("right") == (None if confidence is None else 1.0)
    assert (
        "confidence"
        not in arc_vision([text], LARGE, ArcVisionReward.Settings(variant="original")).components
    )


def test_a_row_may_have_weights_of_its_own() -> None:
    row = {"reward_weights": {"task": 1.0, "tool": 0.0, "gate": 0.0}}
    values = []
    for settings in (
        DEFAULTS,
        DEFAULTS.model_copy(update={"row_weights": False}),
        ArcVisionReward.Settings(variant="original"),
    ):
        scored = ArcVisionReward(settings).score(
            EMPTY_TRAJECTORY, Task("t", (), SMALL, extra=row), ScoreContext(0, [said(SMALL)])
        )
        assert isinstance(scored, Scored)
        values.append(scored.value)
    assert values == pytest.approx([1.0, 0.6, 0.6])
    with pytest.raises(DataFailure, match="reward_weights"):
        ArcVisionReward(DEFAULTS).score(
            EMPTY_TRAJECTORY,
            Task("t", (), SMALL, extra={"reward_weights": 3}),
            ScoreContext(0, ["x"]),
        )


def test_the_reader_gives_the_rows_weights_to_the_reward(tmp_path: Path) -> None:
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    weights = {"task": 0.5, "tool": 0.4, "gate": 0.1}
    row = {
        "images": [{"image": "a.png"}],
        "ground_truth": list(LARGE),
        "reward_model": {"reward_weights": weights},
        "extra_info": {"split": "train", "index": 1, "original_instruction": "x"},
    }
    assert (
        GroundingRows(GroundingRows.Settings())
        .task(row, "rows:1", tmp_path)
        .extra["reward_weights"]
        == weights
    )


# The preset ---------------------------------------------------------------------------------------


def test_what_the_preset_teaches_is_carried_out_and_paid(tmp_path: Path) -> None:
    """The original's prompt shows a call that its engine does not parse, and pays for writing it."""
    config = load(ROOT / "recipes/arc_vision/arc_vision.yaml", [], RunConfig)
    check_components(config)
    Image.new("RGB", (640, 480)).save(tmp_path / "screen.png")
    row = {"id": "a", "image": "screen.png", "instruction": "close the window", "bbox": SMALL}
    task = config.data.reader.build().task(row, "rows:1", tmp_path)
    image, prompt = task.messages[0].parts
    assert isinstance(image, ImageSource)
    assert "close the window" in prompt
    (call,) = re.findall("<tool_call>.*</tool_call>", prompt)

    environment = config.environment.episode.environment.build()
    environment.reset(task)
    step = environment.step(f"<reasoning>Tiny.</reasoning>{call}")
    assert step.error is None
    assert step.observation is not None
    assert step.observation.messages == (
        Message("user", ("image 1: 320x120 pixels", step.observation.messages[0].parts[1])),
    )
    assert environment.step(said(SMALL)).done

    reward = config.reward.source.build()
    answered = reward.score(EMPTY_TRAJECTORY, task, ScoreContext(0, [call, said(SMALL)]))
    assert answered.value == pytest.approx(0.72)
    assert reward.score(EMPTY_TRAJECTORY, task, ScoreContext(0, [call, call])).value == 0.0
    assert reward.score(
        EMPTY_TRAJECTORY, task, ScoreContext(0, [ZOOM + said(SMALL)])
    ).value == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("pixels", "text", "iou"),
    [
        ("none", '{"bbox_2d": [20, 20, 40, 40]}', 0.0),
        ("none", "<bbox>[0.2,0.2,0.4,0.4]</bbox>", 1.0),
        ("thousandths", '{"bbox_2d": [200, 200, 400, 400]}', 1.0),
        ("thousandths", "<bbox>[0.2,0.2,0.4,0.4]</bbox>", 1.0),
        ("shown", '{"bbox_2d": [20, 20, 40, 40]}', 1.0),
    ],
)
def test_a_benchmark_reads_the_boxes_that_training_pays(pixels: str, text: str, iou: float) -> None:
    reward = IoUReward(IoUReward.Settings.model_validate({"pixels": pixels}))
    task = Task("t", (), [0.2, 0.2, 0.4, 0.4], extra={"image_size": [100, 100]})
    scored = reward.score(EMPTY_TRAJECTORY, task, ScoreContext(0, [text]))
    assert isinstance(scored, Scored)
    assert scored.value == pytest.approx(iou)
    nobody_says = reward.score(
        EMPTY_TRAJECTORY,
        Task("t", (), [0.2, 0.2, 0.4, 0.4]),
        ScoreContext(0, ['{"bbox_2d": [20, 20, 40, 40]}']),
    )
    assert isinstance(nobody_says, Scored)
    assert (
        nobody_says.flags
        == {"none": ("unparsable",), "shown": ("unknown_size",), "thousandths": ()}[pixels]
    )
