"""Tools that look at images: every one driven from the prompt as it is rendered, the rules for
boxes, and what is refused.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import decode
from rayloop.envs.image_tools import MOST_PIXELS, ImageTools, Name
from rayloop.envs.tools import schemas

NAMES: tuple[str, ...] = get_args(Name)
QWEN3 = """\
{%- if tools -%}<|im_start|>system
# Tools

<tools>{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}{{- '\\n' -}}</tools>

Within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>{{- '\\n' -}}
{%- endif -%}
"""
"""Where a template that knows tools writes them, as Qwen3-VL's does."""


def page(width: int = 400, height: int = 200) -> Image.Image:
    """Each pixel encodes its own place: red is x / 2, green is y."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width)[None] // 2
    pixels[..., 1] = np.arange(height)[:, None]
    return Image.fromarray(pixels)


def task(image: Image.Image) -> Task:
    file = io.BytesIO()
    image.save(file, "PNG")
    return Task("t1", (Message("user", (ImageSource(data=file.getvalue()), "What is there?")),))


def made(image: Image.Image | None = None, **settings: Any) -> ImageTools:
    environment = ImageTools(
        ImageTools.Settings.model_validate({"image_tools": NAMES, "min_side": 14, **settings})
    )
    environment.reset(task(image or page()))
    return environment


def call(environment: ImageTools, name: str, **arguments: Any) -> tuple[Image.Image | None, str]:
    """What the policy sees: the image, and the text."""
    step = environment.step(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    )
    assert step.observation is not None
    parts = step.observation.messages[0].parts
    images = [part.data for part in parts if isinstance(part, ImageSource)]
    text = "".join(part for part in parts if isinstance(part, str))
    assert (step.error is None) == bool(images)
    return (decode(images[0]) if images and images[0] else None), text


def as_its_schema_says(parameters: dict[str, Any]) -> dict[str, Any]:
    """Arguments by a reader who knows nothing but the schema: what is required, by its example."""
    return {name: parameters["properties"][name]["examples"][0] for name in parameters["required"]}


@pytest.mark.parametrize("coordinates", ["fraction", "pixel"])
@pytest.mark.parametrize("describe", ["prompt", "template"])
def test_every_tool_can_be_driven_from_the_rendered_prompt(
    describe: str, coordinates: str, vision_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(vision_folder, tmp_path / "model")
    if describe == "template":
        own = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        (folder / "chat_template.jinja").write_text(QWEN3 + own, encoding="utf-8")
    renderer = Renderer(ModelSettings(path=str(folder)))
    environment = made(describe=describe, coordinates=coordinates)
    first = environment.reset(task(page()))
    prompt = renderer.shown(renderer.prompt(first.messages, schemas(environment)).token_ids)
    described = re.findall(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)[-1]
    functions = [json.loads(line)["function"] for line in described.splitlines()]
    assert [function["name"] for function in functions] == list(NAMES)
    form = re.findall(r"<tool_call>\n.*?\n</tool_call>", prompt, re.DOTALL)[-1]
    for function in functions:
        arguments = json.dumps(as_its_schema_says(function["parameters"]))
        said = form.replace("<function-name>", json.dumps(function["name"])).replace(
            "<args-json-object>", arguments
        )
        step = environment.step(f"I look closer.\n{said}")
        assert step.error is None, step.error
        assert step.observation is not None
        seen = renderer.observation(step.observation.messages, ())
        assert len(seen.images) == 1


def test_templates_and_prompts_do_not_both_describe_the_tools() -> None:
    for describe, in_template, messages in (
        ("template", len(NAMES), 1),
        ("prompt", 0, 2),
        ("nowhere", 0, 1),
    ):
        environment = made(describe=describe)
        assert len(schemas(environment)) == in_template
        assert len(environment.reset(task(page())).messages) == messages


def test_a_system_message_of_the_task_is_kept() -> None:
    environment = made(describe="prompt")
    asked = task(page())
    first = environment.reset(Task("t1", (Message("system", ("Be brief.",)), *asked.messages)))
    system, user = first.messages
    assert (system.role, system.parts[0], user) == ("system", "Be brief.", asked.messages[0])
    assert "<tools>" in str(system.parts[-1])


def test_crop_and_zoom_cut_the_place_that_was_asked_for() -> None:
    environment = made()
    cut, text = call(environment, "crop", box=[0.5, 0.25, 1, 0.75])
    assert cut is not None
    assert (cut.size, cut.getpixel((0, 0)), cut.getpixel((199, 99))) == (
        (200, 100),
        (100, 50, 0),
        (199, 149, 0),
    )
    assert text == "image 1: 200x100 pixels"
    enlarged, _ = call(environment, "zoom", box=[0.5, 0.25, 1, 0.75], factor=3)
    assert enlarged is not None
    assert enlarged.size == (600, 300)
    assert enlarged.getpixel((300, 150)) == pytest.approx((150, 100, 0), abs=1)
    doubled, _ = call(environment, "zoom", box=[0, 0, 1, 1])
    assert doubled is not None
    assert doubled.size == (800, 400)


def test_a_box_in_pixels_is_of_the_original_image() -> None:
    cut, _ = call(made(coordinates="pixel"), "crop", box=[100, 40, 300, 140])
    assert cut is not None
    assert (cut.size, cut.getpixel((0, 0))) == ((200, 100), (50, 40, 0))


@pytest.mark.parametrize(
    ("coordinates", "box", "size"),
    [
        ("fraction", [-3, -1e308, 0.5, 0.5], (200, 100)),
        ("fraction", [0.5, 0.5, 7, 10**400], (200, 100)),
        ("pixel", [300, -5, 4000, 100], (100, 100)),
    ],
)
def test_a_box_is_clamped_to_the_image(
    coordinates: str, box: list[float], size: tuple[int, int]
) -> None:
    cut, _ = call(made(coordinates=coordinates), "crop", box=box)
    assert cut is not None
    assert cut.size == size


def test_results_are_images_that_can_be_looked_at_again() -> None:
    environment = made()
    turned, _ = call(environment, "rotate", angle=90)
    assert turned is not None
    assert (turned.size, turned.getpixel((0, 199))) == ((200, 400), page().getpixel((200, 0)))
    cut, text = call(environment, "crop", box=[0, 0, 1, 0.5], image=1)
    assert cut is not None
    assert (cut.size, text) == ((200, 200), "image 2: 200x200 pixels")
    assert "no image 3" in call(environment, "crop", box=[0, 0, 1, 1], image=3)[1]


def test_a_slanted_rotation_keeps_the_whole_image() -> None:
    turned, _ = call(made(), "rotate", angle=-30)
    assert turned is not None
    assert turned.size == pytest.approx((447, 374), abs=2)
    assert turned.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("size", [(8000, 80), (80, 8000), (3000, 3000), (4000, 3900)])
def test_a_picture_of_any_shape_that_is_turned_has_at_most_so_many_pixels(
    size: tuple[int, int],
) -> None:
    turned, _ = call(made(Image.new("RGB", size)), "rotate", angle=45)
    assert turned is not None
    assert 0.8 * MOST_PIXELS < turned.width * turned.height <= MOST_PIXELS


def test_inspect_measures_the_box_and_marks_it_in_the_whole_image() -> None:
    image = Image.new("RGB", (400, 200), "white")
    image.paste("#0000ff", (100, 50, 150, 100))
    marked, text = call(made(image), "inspect", box=[0.25, 0.25, 0.5, 0.5])
    assert text.startswith(
        "100x50 pixels at (100, 50), 6.2% of the image; mean colour #8080ff, contrast 8.6; image 1"
    )
    assert marked is not None
    assert (marked.size, marked.getpixel((99, 60)), marked.getpixel((101, 60))) == (
        (400, 200),
        (255, 0, 0),
        (0, 0, 255),
    )


def test_waiting_takes_its_time_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("rayloop.envs.image_tools.time.sleep", slept.append)
    environment = made(wait_limit=2)
    again, text = call(environment, "wait", seconds=1.5)
    assert again is not None
    assert (again.tobytes(), slept) == (page().tobytes(), [1.5])
    assert text == "1.5 seconds later nothing has changed; image 1: 400x200 pixels"
    assert "the 0.5 that are left to wait" in call(environment, "wait", seconds=1)[1]
    assert slept == [1.5]


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("crop", {"box": [1]}, "box must be"),
        ("crop", {"box": [0, 0, True, 1]}, "box must be"),
        ("crop", {"box": [0, 0, 1, float("nan")]}, "box must be"),
        ("zoom", {"box": [0.5, 0, 0.5, 1]}, "x1 < x2 and y1 < y2"),
        ("zoom", {"box": [1.5, 0, 2, 1]}, "x1 < x2 and y1 < y2"),
        ("inspect", {"box": [0, 0, 0.03, 1]}, "covers 12x200 pixels, each side needs 14"),
        ("crop", {"box": [0, 0, 1, 0.1]}, "one side is too long"),
        ("zoom", {"box": [0, 0, 1, 1], "factor": 5}, "must be from 1 to 4"),
        ("zoom", {"box": [0, 0, 1, 1], "factor": float("nan")}, "must be from 1 to 4"),
        ("rotate", {"angle": float("inf")}, "must be from -360 to 360"),
        ("wait", {"seconds": float("nan")}, "left to wait"),
        ("wait", {"seconds": -1}, "left to wait"),
        ("inspect", {"box": [0, 0, 1, 1], "image": -1}, "no image -1"),
    ],
)
def test_what_cannot_be_done_is_said_to_the_policy(
    name: str, arguments: dict[str, Any], complaint: str
) -> None:
    image, text = call(made(max_aspect=15), name, **arguments)
    assert image is None
    assert complaint in text


def test_only_the_tools_that_were_named_are_there() -> None:
    environment = made(image_tools=["zoom"])
    assert (
        "unknown tool 'crop'; the tools are: zoom" in call(environment, "crop", box=[0, 0, 1, 1])[1]
    )


def test_a_result_has_a_size_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayloop.envs.image_tools.MOST_PIXELS", 100_000)
    environment = made(max_zoom=50)
    for name, arguments in (
        ("zoom", {"box": [0, 0, 1, 1], "factor": 50}),
        ("rotate", {"angle": 45}),
    ):
        result, _ = call(environment, name, **arguments)
        assert result is not None
        assert result.width * result.height <= 120_000


def test_waiting_must_end_before_the_tools_deadline() -> None:
    with pytest.raises(ValueError, match=r"wait_limit 5\.0 must be below tool_timeout 2"):
        ImageTools.Settings(tool_timeout=2, image_tools=("wait",))
