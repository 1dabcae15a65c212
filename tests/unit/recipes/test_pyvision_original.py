"""PyVision and DeepEyes as published: prompts, rows' own prompts, tools under their names, and what
the interpreter says.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from rayloop.config.settings import load
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import decode
from rayloop.envs.image_tools import ImageTools
from rayloop.envs.interpreter import text
from rayloop.recipes.pyvision.data import Published, QuestionRows, answered, published_text
from rayloop.recipes.pyvision.toolbox import VisualToolBoxV2
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from rayloop.run.config import RunConfig, read
from tests.support.pictures import picture
from tests.support.runs import ROOT

RECIPE = ROOT / "recipes/pyvision"
CALL = '<think>t</think><tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def reader(**settings: Any) -> QuestionRows:
    return QuestionRows(QuestionRows.Settings.model_validate(settings))


def said(message: Message) -> str:
    return "".join(part if isinstance(part, str) else "<image>" for part in message.parts)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(picture(96, 64))
    return tmp_path


@pytest.mark.parametrize("file", ["published.yaml", "published_deepeyes.yaml"])
def test_the_shipped_texts_have_the_published_hashes(file: str) -> None:
    prompts = yaml.safe_load((RECIPE / file).read_text(encoding="utf-8"))["prompts"]
    assert all(
        hashlib.sha256((RECIPE / one["file"]).read_bytes()).hexdigest() == one["sha256"]
        for one in prompts
    )


def test_every_text_is_listed() -> None:
    listed = {
        one["file"]
        for f in RECIPE.glob("published*.yaml")
        for one in yaml.safe_load(f.read_text(encoding="utf-8"))["prompts"]
    }
    assert listed == {f"prompts/{file.name}" for file in (RECIPE / "prompts").iterdir()}


def test_a_row_is_asked_as_pyvision_asks(page: Path) -> None:
    row = {"id": "1", "image": "a.png", "question": "Which {x}?", "answer": "A"}
    (message,) = reader(published="vistool_with_img_info_v2").task(row, "rows:1", page).messages
    whole = said(message)
    assert message.role == "user"
    assert whole.startswith(
        "<image>\nYou are an agent - please keep going until the user\u2019s query"
    )
    assert "\nImage Width: 96; Image Height: 64\n\n*user question:*\n" in whole
    assert "in the format of \\boxed{answer}\n\nWhich {x}?\n\nRemember" in whole
    (hidden,) = (
        reader(published="vis_tool_with_img_info_wo_init_image_v2")
        .task(row, "rows:1", page)
        .messages
    )
    assert "Image Width: 96; Image Height: 64\nThe original image hint" in said(hidden)
    assert len(hidden.images) == 1, "which the interpreter has, and the environment hides"


def test_a_row_is_asked_as_deepeyes_asks(page: Path) -> None:
    row = {"id": "1", "image": "a.png", "question": "Which?", "answer": "A"}
    system, user = reader(published="deepeyes").task(row, "rows:1", page).messages
    assert (system.role, said(system)) == ("system", published_text("deepeyes_system"))
    assert said(user) == "<image>Which?" + published_text("deepeyes_user")


def test_a_film_is_asked_about_with_its_size_and_rate(page: Path) -> None:
    row = {"id": "1", "videos": [["a.png", "a.png"]], "fps": 2, "question": "Which?", "answer": "A"}
    task = reader(published="vis_tool_with_img_info_video_v4").task(row, "rows:1", page)
    assert (
        "Frame Width: 96; Frame Height: 64;\nVideo Length: 2; Sample FPS: 2.00\nThe original video"
        in said(task.messages[0])
    )
    assert not task.images
    two = {**row, "videos": [["a.png", "a.png"], ["a.png"]], "fps": [4.0, 8.0]}
    task = reader(published="vis_tool_with_img_info_video_v4").task(two, "rows:1", page)
    assert "Sample FPS: 4.00\n" in said(task.messages[0]), "the first film's"
    with pytest.raises(DataFailure, match="describes a video"):
        reader(published="vis_tool_with_img_info_video_v4").task(
            {**row, "videos": [], "image": "a.png"}, "rows:1", page
        )


@pytest.mark.parametrize("kind", ["direct_attributes", "relative_position", "single", "cross"])
@pytest.mark.parametrize(("letter", "value"), [("A", 1.0), ("B", 0.0)])
def test_rows_of_the_benchmarks_are_judged_as_the_originals(
    kind: str, letter: str, value: float, page: Path
) -> None:
    """``data prepare`` keeps the published categories as sources; the original's rows say vstar and
    hrbench-4k.
    """
    config = read(RECIPE / "presets/faithful.yaml", ["reward.source.with.accuracy=null"])
    row = {
        "id": "1",
        "image": "a.png",
        "question": "Which?\n(A) red\n(B) blue",
        "answer": "A",
        "kind": kind,
    }
    asked = config.data.reader.build().task(row, "rows:1", page)
    outcome = config.reward.source.build().score(
        EMPTY_TRAJECTORY, asked, ScoreContext(0, [answered(letter)])
    )
    assert isinstance(outcome, Scored)
    assert (outcome.value, outcome.flags) == (value, ())


@pytest.mark.parametrize("published", ["vistool_with_img_info_v2", "deepeyes"])
def test_a_rows_own_prompt_goes_first(published: Published, page: Path) -> None:
    own = [{"role": "system", "content": "S"}, {"role": "user", "content": "<image>\nMine"}]
    row = {"id": "1", "image": "a.png", "question": "Which?", "answer": "A", "prompt": own}
    assert [
        (m.role, said(m)) for m in reader(published=published).task(row, "rows:1", page).messages
    ] == [("system", "S"), ("user", "<image>\nMine")]
    assert said(reader().task(row, "rows:1", page).messages[0]) == "<image>Which?"


def test_rows_are_read_as_their_authors_publish_them(page: Path) -> None:
    own = [{"role": "system", "content": "S"}, {"role": "user", "content": "<image>\nMine"}]
    verl: dict[str, Any] = {
        "prompt": own,
        "data_source": "vstar",
        "reward_model": {"ground_truth": "A", "style": "model"},
    }
    verl["extra_info"] = {"answer": "A", "index": "0", "question": "Which?", "split": "train"}
    data = (page / "a.png").read_bytes()
    shown = {
        **verl,
        "env_name": "visual_toolbox_v2",
        "images": [{"bytes": data, "path": None}],
        "mm_hint": None,
    }
    made = reader(published="deepeyes").task(shown, "data/rows.parquet:3", page)
    assert [said(message) for message in made.messages] == ["S", "<image>\nMine"]
    assert made.messages[1].images == [ImageSource(data=data)]
    assert (made.id, made.ground_truth, made.source, made.environment) == (
        "rows.parquet:3",
        "A",
        "vstar",
        "visual_toolbox_v2",
    )
    assert made.extra["question"] == "Which?"
    assert not {"image", "images"} & set(made.extra), "which would travel twice"
    plain = reader().task(
        {"question": "Which?", "answer": "A", "image_path": "a.png"}, "data/rows.json:2", page
    )
    assert (plain.id, plain.ground_truth, plain.messages[0].images) == (
        "rows.json:2",
        "A",
        [ImageSource(str(page / "a.png"))],
    )
    with pytest.raises(DataFailure, match="'images' is missing"):
        reader().task(verl, "rows:1", page)


def test_a_prompt_of_ones_own_may_name_columns_and_the_images_size(page: Path) -> None:
    row = {"id": "1", "image": "a.png", "question": "Which {kind}?", "answer": "A", "kind": "k"}
    made = reader(prompt="{width}x{height} {kind} {other}: {question}").task(row, "rows:1", page)
    assert said(made.messages[0]) == "<image>96x64 k {other}: Which {kind}?"


# Tools --------------------------------------------------------------------------------------------


def task(width: int = 400, height: int = 120) -> Task:
    file = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").resize((width, height)).save(file, "PNG")
    return Task("t", (Message("user", (ImageSource(data=file.getvalue()), "Which?")),))


def toolbox() -> VisualToolBoxV2:
    made = VisualToolBoxV2()
    made.reset(task())
    return made


@pytest.mark.parametrize("environment", ["corrected", "original"])
def test_a_published_call_works(environment: str) -> None:
    if environment == "original":
        made: Any = toolbox()
    else:
        config = load(RECIPE / "deepeyes.yaml", [], RunConfig)
        made = config.environment.episode.environment.build()
        assert isinstance(made, ImageTools)
        made.reset(task())
    for name, arguments, size in (
        (
            "image_zoom_in_tool",
            '{"bbox_2d": [10, 20, 100, 200], "label": "the apple on the desk"}',
            (90, 100),
        ),
        (
            "image_rotate_tool",
            '{"angle": 90}',
            (400, 120) if environment == "original" else (120, 400),
        ),
    ):
        step = made.step(CALL % (name, arguments))
        assert step.observation is not None
        assert step.error is None
        (message,) = step.observation.messages
        assert message.role == "user"
        assert decode(message.images[0].data or b"").size == size


@pytest.mark.parametrize(
    ("turn", "shown"),
    [
        (CALL % ("image_zoom_in_tool", '{"box": [1, 2, 3, 4]}'), "Error: 'bbox_2d'"),
        (
            CALL % ("image_zoom_in_tool", '{"bbox_2d": [0, 0, 30, 90]}'),
            "Error: ZOOM IN ARGUMENTS ARE INVALID",
        ),
        (
            CALL % ("image_zoom_in_tool", '{"bbox_2d": [0, 0, 31, 90]}'),
            "<tool_response><image>\nThink first, call **image_zoom",
        ),
        (CALL % ("crop", "{}"), "Error: Unknown tool name: crop"),
        (
            "<tool_call>x</tool_call>",
            "Error: Invalid tool call format: x. Error: Expecting value: line 1 column 1 (char 0)",
        ),
        ("<answer>B</answer>" + CALL % ("crop", "{}"), None),
        ("I think.", None),
    ],
)
def test_the_toolbox_answers_as_published(turn: str, shown: str | None) -> None:
    step = toolbox().step(turn)
    assert step.done == (shown is None)
    if shown is not None:
        assert step.observation is not None
        assert said(step.observation.messages[0]).startswith(shown)


def test_a_task_without_an_image_has_nothing_to_look_at() -> None:
    with pytest.raises(DataFailure, match="has none"):
        VisualToolBoxV2().reset(Task("t", (Message("user", ("Which?",)),)))


# The interpreter's wording ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "code", "answer"),
    [
        ("<code>\n```python\n x = 1 \n```\n</code>", "x = 1", None),
        ("<code>```python x = 1```</code>", "x = 1", None),
        ("<code>\n```py\nx = 1\n```\n</code>", None, None),
        ("<code>\n```python\nx = 1\n```", "x = 1", None),
        ("```python\na\n```\n```python\nb\n```", "b", None),
        ("<code>\n```python\n\n```\n</code>\n```python\nb\n```", None, None),
        ("<answer>\n</answer>", None, "\n"),
        ("<answer>a</answer><answer></answer>", None, None),
    ],
)
def test_turns_are_read_as_pyvision_reads_them(
    turn: str, code: str | None, answer: str | None
) -> None:
    assert (text.published_code(turn), text.published_answer(turn)) == (code, answer)


@pytest.mark.parametrize("piece", ["<code>", "```python", "<code>\n```python", "``` ", "\n"])
def test_the_code_behind_a_long_turn_is_found(piece: str) -> None:
    """A pattern that tries each piece again meets the deadline of tests."""
    read = text.published_code(piece * 40_000 + "<code>\n```python\nlast = 1\n```\n</code>")
    assert read is not None
    assert read.endswith("last = 1")


def test_quickstart_original_differs_only_where_it_says() -> None:
    mine, theirs = (
        read(RECIPE / f"{name}.yaml", []) for name in ("quickstart", "quickstart_original")
    )
    assert theirs.model.model_copy(update={"path": mine.model.path}) == mine.model
    assert theirs.policy == mine.policy
    assert theirs.reward.source.build().transcript
    assert (
        json.loads(mine.model_dump_json())["evaluation"]
        == json.loads(theirs.model_dump_json())["evaluation"]
    )
