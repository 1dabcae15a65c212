"""Arc Vision as published: what its own code paid (tests/data/originals), its prompt, its tools and
the gate by confidence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop.core.failures import ConfigError
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext, StepResult
from rayloop.core.types import ImageSource, Task
from rayloop.recipes.arc_vision.data import PROMPTS, GroundingRows
from rayloop.recipes.arc_vision.reward import ArcVisionReward
from rayloop.recipes.arc_vision.tools import UNSURE, ArcVisionTools, described
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from rayloop.run.config import read
from tests.originals.test_arc_vision import FILE, differing, played
from tests.support.runs import ROOT

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))
ZOOM = (
    '<tool_call>\n{"name": "zoom_ui_element", "arguments": {"region": [0.0, 0.0, 0.5,'
    " 0.5]}}\n</tool_call>"
)
INSPECT = (
    '<tool_call>\n{"name": "inspect_element", "arguments": {"region": [0.0, 0.0, 0.5, 0.5], "type":'
    ' "properties"}}\n</tool_call>'
)
ROW = {
    "id": "a",
    "image": "screen.png",
    "instruction": "close {width}",
    "bbox": [0.1, 0.1, 0.2, 0.2],
    "platform": "web",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (640, 480)).save(tmp_path / "screen.png")
    return tmp_path


def task(folder: Path, row: dict[str, Any] = ROW, **settings: Any) -> Task:
    return GroundingRows(GroundingRows.Settings.model_validate(settings)).task(
        row, "rows:1", folder
    )


def tools(folder: Path, **settings: Any) -> ArcVisionTools:
    made = ArcVisionTools(ArcVisionTools.Settings.model_validate(settings))
    made.reset(task(folder))
    return made


def texts(step: StepResult) -> list[str]:
    assert step.observation is not None
    return [
        "".join(part for part in message.parts if isinstance(part, str))
        for message in step.observation.messages
    ]


def images(step: StepResult) -> int:
    assert step.observation is not None
    return sum(
        isinstance(part, ImageSource)
        for message in step.observation.messages
        for part in message.parts
    )


def test_recorded_scores_are_reproduced() -> None:
    assert len(RECORDED["scores"]) >= 300
    assert [one for one in RECORDED["scores"] if differing(one["text"], one["truth"], one)] == []
    assert len({round(one["original"], 3) for one in RECORDED["scores"]}) > 30, "cases that differ"


def test_recorded_results_of_tools_are_reproduced() -> None:
    assert [
        one
        for one in RECORDED["episodes"]
        if played([(n, g) for n, g in one["calls"]]) != one["results"]
    ] == []


def test_the_originals_prompt_is_written_behind_the_image(folder: Path) -> None:
    image, text = task(folder, template="arc_vision").messages[0].parts
    assert isinstance(image, ImageSource)
    shipped = (PROMPTS / "arc_vision.txt").read_bytes().decode()
    assert f"<image>{text}" == shipped.replace("{instruction}", "close {width}")


def test_a_template_may_name_columns_and_the_images_size_and_place(folder: Path) -> None:
    own = folder / "own.txt"
    own.write_bytes(b'{platform} {width}x{height} <image> {instruction}: {nothing} {"a": 1}')
    before, image, after = task(folder, template=str(own)).messages[0].parts
    assert isinstance(image, ImageSource)
    assert (before, after) == ("web 640x480 ", ' close {width}: {nothing} {"a": 1}')


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_family_has_a_prompt_that_asks_for_its_boxes(folder: Path, family: str) -> None:
    image, text = task(folder, template=family).messages[0].parts
    assert isinstance(image, ImageSource)
    assert "JSON" in str(text)
    assert "close {width}" in str(text)


def test_a_template_that_is_nowhere_names_the_places() -> None:
    with pytest.raises(ConfigError, match=r"qwen9.*prompts/qwen9\.txt and qwen9"):
        GroundingRows(GroundingRows.Settings(template="qwen9"))


def test_all_calls_of_a_turn_are_answered_in_the_originals_words(folder: Path) -> None:
    environment = tools(folder, results="simulated")
    step = environment.step(f"First.{ZOOM}{INSPECT}" + ZOOM.replace("zoom_ui_element", "crop"))
    assert texts(step) == [
        "Zoomed into region [0, 0, 0.5, 0.5] with factor 2.0. Confidence gain: 0.30",
        "Inspection result: Element type: button, state: enabled, z-index: 1000",
        "Error: Function 'crop' not available. Use 'database_query' function instead.",
    ]
    assert step.error is None
    assert step.observation is not None
    assert [message.role for message in step.observation.messages] == ["tool"] * 3
    assert environment.step(f"Again.{ZOOM}").observation is not None
    assert "gain: 0.24" in texts(tools(folder, results="simulated").step(ZOOM + ZOOM))[1]


@pytest.mark.parametrize(
    "text",
    [
        "<use_tool>zoom_ui_element</use_tool>",
        "<tool_call>zoom</tool_call>",
        "<bbox>[0,0,1,1]</bbox>",
    ],
)
def test_what_the_originals_engine_does_not_parse_ends_the_episode(folder: Path, text: str) -> None:
    assert tools(folder, results="simulated").step(text).done


def test_arguments_of_another_kind_are_an_error_the_policy_sees(folder: Path) -> None:
    step = tools(folder, results="simulated").step(ZOOM.replace("[0.0, 0.0, 0.5, 0.5]", '"all"'))
    assert step.error
    assert not step.done


def test_real_results_have_the_originals_names_and_arguments(folder: Path) -> None:
    assert [tool["name"] for tool in described()] == [
        "zoom_ui_element",
        "wait_for_ui",
        "inspect_element",
    ]
    assert described() is described()  # read once, not in each episode
    environment = tools(folder)
    zoomed = environment.step(ZOOM.replace("0.5]", '0.5], "zoom_factor": 1.5'))
    assert texts(zoomed) == ["image 1: 480x360 pixels"]
    assert images(zoomed) == 1
    inspected = environment.step(INSPECT)
    assert "25.0% of the image" in texts(inspected)[0]
    assert images(inspected) == 1
    assert (
        "0.1 seconds later"
        in texts(
            environment.step(
                '<tool_call>{"name": "wait_for_ui", "arguments": {"duration": 0.1}}</tool_call>'
            )
        )[0]
    )
    assert environment.step(INSPECT.replace("properties", "colour")).error
    assert environment.step(ZOOM.replace("zoom_ui_element", "crop")).error
    assert environment.step(ZOOM.replace("region", "box")).error


def test_the_call_that_the_originals_prompt_teaches_can_be_carried_out(folder: Path) -> None:
    step = tools(folder, named=True).step("<use_tool>zoom_ui_element</use_tool>")
    assert texts(step) == ["image 1: 640x480 pixels"]
    assert images(step) == 1
    assert tools(folder, named=True).step("<use_tool>frob</use_tool>").error
    assert tools(folder).step("<use_tool>zoom_ui_element</use_tool>").done


def test_an_answer_below_the_gate_is_asked_for_once_more(folder: Path) -> None:
    answer = "<bbox>[0.25,0.25,0.5,0.5]</bbox><confidence>0.4</confidence>"
    environment = tools(folder, gate=0.7)
    step = environment.step(answer)
    assert texts(step) == [f"{UNSURE}\nimage 1: 640x480 pixels"]
    assert images(step) == 1
    assert environment.step(answer).done
    for other in (
        answer.replace("0.4", "0.9"),
        answer.replace("0.4", "90%"),
        answer.partition("<conf")[0],
        "<confidence>0.1</confidence>",
    ):
        assert tools(folder, gate=0.7).step(other).done
    assert tools(folder).step(answer).done


def test_the_originals_read_the_results_of_tools_too() -> None:
    """Their manager decodes the whole response, and a list of four numbers between blanks is a box."""
    reward = ArcVisionReward(ArcVisionReward.Settings(variant="original"))
    assert reward.transcript
    assert not ArcVisionReward(ArcVisionReward.Settings()).transcript
    said = "<tool_call>zoom</tool_call>"
    whole = (
        f"{said}<|im_end|>\n<|im_start|>tool\nZoomed into region [0.1, 0.1, 0.2, 0.2] with factor"
        " 2.0.<|im_end|>"
    )
    for transcript, iou in ((whole, 1.0), (None, 0.0)):
        scored = reward.score(
            EMPTY_TRAJECTORY,
            Task("t", (), [0.1, 0.1, 0.2, 0.2]),
            ScoreContext(0, [said], transcript=transcript),
        )
        assert isinstance(scored, Scored)
        assert scored.components["iou"] == pytest.approx(iou)


def test_quickstart_original_asks_as_the_shipped_model_was_trained() -> None:
    """Behind the published prompt it writes nothing that can be read, so that no reward would be
    above 0.
    """
    mine, theirs = (
        read(ROOT / f"recipes/arc_vision/{name}.yaml", [])
        for name in ("quickstart", "quickstart_original")
    )
    assert theirs.data == mine.data
    assert (theirs.model, theirs.policy, theirs.algorithm) == (
        mine.model,
        mine.policy,
        mine.algorithm,
    )
    assert theirs.rollout.sampling.max_tokens > 4 * mine.rollout.sampling.max_tokens, (
        "room for a call"
    )
    task = Task("t", (), [0.0125, 0.6571, 0.3066, 0.7571])
    outcome = theirs.reward.source.build().score(
        EMPTY_TRAJECTORY, task, ScoreContext(0, ["<bbox>[0.00,0.58,0.40,0.82]</bbox>"])
    )
    assert isinstance(outcome, Scored)
    assert outcome.value == pytest.approx(0.153812, abs=1e-6)
