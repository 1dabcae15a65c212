"""Film strips: what a group of episodes with many turns becomes in the report, and what hostile
texts do there: nothing.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import png, tinted, untinted
from rayloop.envs.grammar.actions import Action, Click, Drag, Finish
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings
from rayloop.measure.controls import Item
from rayloop.run.folder import RunFolder
from rayloop.run.records.rollouts import RolloutDump, RolloutRecord, RolloutTurn
from rayloop.view.filmstrip import MAX_TEXT_CHARACTERS, Filmstrips
from rayloop.view.page import content, page, write_page
from rayloop.view.reader import rollout_groups
from tests.support.episodes import recorded
from tests.support.pictures import picture

SIZE = 200, 100
TASK = Task("paint-1", (Message("user", ("{instruction}",)),), source="canvas")
NASTY = (
    "</script><script>document.title = 'owned'</script><img src=x"
    " onerror=\"document.title='owned'\">"
)


class Canvas(ScreenEnvironment):
    """A screen that paints a point where it is clicked."""

    def __init__(self) -> None:
        super().__init__(ScreenSettings.model_validate({"pointing": {"coordinates": "relative"}}))
        self._canvas = Image.new("RGB", SIZE, "white")

    def reset(self, task: Task) -> Observation:
        return self._first(task, "Paint.", self._look())

    def evaluate(self) -> float:
        return 1.0

    def close(self) -> None:
        """Nothing is held."""

    def screen_size(self) -> tuple[int, int]:
        return SIZE

    def _look(self) -> ImageSource:
        return ImageSource(data=png(self._canvas))

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        for action in actions:
            match self._screen.pointing.on(action, *SIZE):
                case Click(at):
                    ImageDraw.Draw(self._canvas).point((at.x, at.y), "black")
                case Drag(start, end):
                    ImageDraw.Draw(self._canvas).line((start.x, start.y, end.x, end.y), "black")
                case Finish():
                    return StepResult(done=True)
        return StepResult(self._shown("Painted.", self._look()))


def click(x: int, y: int) -> str:
    return f"Thought: there\nAction: click(start_box='({x},{y})')"


SAME, DRAG, END = (
    click(500, 500),
    "Action: drag(start_box='(0,0)', end_box='(1000,500)')",
    "Action: finished()",
)
SAID = ((SAME, click(100, 200), END), (SAME, DRAG, END), (SAME, "no action", END))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("run")
    return recorded(
        root,
        "canvas",
        Canvas,
        TASK,
        SAID,
        "the judge liked it",
        pointing={"coordinates": "relative"},
    )


def group(run: RunFolder) -> Any:
    (found,) = content(run, groups=10)["groups"]
    return found


def opened(data: Any, sha: str) -> Image.Image:
    encoded = data["images"][sha]["uri"].removeprefix("data:image/webp;base64,")
    return Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")


def test_clicks_and_drags_are_marked_in_pixels_of_the_picture_that_was_seen(run: RunFolder) -> None:
    first, second, third = (member["cells"] for member in group(run)["members"])
    assert [mark["at"] for mark in first[0]["marks"]] == [[100, 50]]
    assert [mark["at"] for mark in first[1]["marks"]] == [[20, 20]]
    assert [(mark["kind"], mark["at"]) for mark in second[1]["marks"]] == [
        ("drag", [0, 0, 199, 50])
    ]
    assert (third[1]["marks"], third[1]["executed"]) == ([], False)
    assert first[1]["on"] == first[1]["images"][0] != first[0]["on"]
    assert "Painted." in first[1]["said"]
    assert "<|" not in first[1]["said"]


def test_the_turn_where_members_part_is_that_of_the_first_other_observation(run: RunFolder) -> None:
    found = group(run)
    assert (found["turns"], found["parts"], found["moving"]) == (3, 2, True)
    letters = [[cell["letter"] for cell in member["cells"]] for member in found["members"]]
    assert letters == [["A", "A", "A"], ["A", "A", "B"], ["A", "A", "C"]]


def test_members_do_not_part_before_they_have_acted(run: RunFolder) -> None:
    """Two renderings of a page may differ by a shade."""
    members = [dict(record) for record in next(iter(rollout_groups(run)))]
    members[1]["states"] = ["other", *members[1]["states"][1:]]
    found = Filmstrips(run).group(members, run.rollouts.path)
    assert found["parts"] == 2
    assert found["members"][1]["cells"][0]["letter"] == "B"


def test_pictures_are_without_the_tint(run: RunFolder) -> None:
    data = content(run, groups=10)
    cell = data["groups"][0]["members"][0]["cells"][1]
    shown = opened(data, cell["images"][0])
    assert shown.size == SIZE
    assert min(shown.getpixel((3, 3))) > 245
    assert min(shown.getpixel((196, 96))) > 245
    assert max(shown.getpixel((100, 50))) < 120, "what the first click painted"


def test_the_tint_is_taken_away_but_for_rounding() -> None:
    before = Image.effect_noise((64, 48), 80).convert("RGB")
    with Image.open(io.BytesIO(tinted(png(before), 0.3))) as image:
        after = untinted(image.convert("RGB"), 0.3)
    pairs = zip(before.tobytes(), after.tobytes(), strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1


def test_every_token_has_its_log_prob_and_unlikely_ones_are_shaded(run: RunFolder) -> None:
    record = next(iter(run.rollouts))
    turn = record["turns"][0]
    assert len(turn["logprobs"]) > 5
    assert [logprob for _, logprob in turn["logprobs"]] == [
        -float(n) for n in range(len(turn["logprobs"]))
    ]
    assert turn["logprobs"][-1][0] == len(turn["text"])
    runs = group(run)["members"][0]["cells"][0]["runs"]
    assert "".join(part["text"] for part in runs) == turn["text"] == SAME
    assert [part["shade"] for part in runs] == [0, 1, 2, 3, 4]


def test_the_end_has_the_reward_its_parts_and_the_judges_reason(run: RunFolder) -> None:
    html = write_page(run.path, None, groups=10).read_text(encoding="utf-8")
    assert html.count("the judge liked it") == 3
    assert [member["reward"] for member in group(run)["members"]] == [0.0, 1.0, 2.0]
    assert "<bdi>result</bdi> 1" in html


def member(sample: int, *turns: RolloutTurn, task: str = "t", image: str = "") -> RolloutRecord:
    images = (
        ({"sha256": image, "width": 60, "height": 40, "file": f"images/{image}.png"},)
        if image
        else ()
    )
    return RolloutRecord(1, sample, 0, task, "tools", "look", images, turns, "done", 1.0)


def test_the_box_of_a_tool_call_is_drawn_on_the_image_that_it_names(tmp_path: Path) -> None:
    def call(**arguments: Any) -> RolloutTurn:
        return RolloutTurn(
            "assistant",
            f"<tool_call>{json.dumps({'name': 'crop', 'arguments': arguments})}</tool_call>",
            True,
        )

    cropped = ({"sha256": "bb" * 32, "width": 30, "height": 10, "file": f"images/{'bb' * 32}.png"},)
    output = RolloutTurn("tool", "image 1: 30x10 pixels", False, cropped)
    turns = (
        call(box=[0.0, 0.5, 0.5, 1.0]),
        output,
        call(bbox_2d=[3, 2, 12, 8], image=1),
        output,
        call(box="no"),
        output,
    )
    with RunFolder(tmp_path, "run").acquired() as run:
        images = {"aa" * 32: picture(60, 40), "bb" * 32: picture(30, 10, "blue")}
        run.rollouts.write(1, [member(0, *turns, image="aa" * 32)], images)
    cells = group(run)["members"][0]["cells"]
    assert [(cell["on"][:2], [mark["at"] for mark in cell["marks"]]) for cell in cells] == [
        ("aa", [(0.0, 20.0, 30.0, 20.0)]),
        ("bb", [(3, 2, 9, 6)]),
        ("", []),
        ("", []),
    ]
    assert cells[1]["said"] == "image 1: 30x10 pixels"
    assert cells[3]["text"] is None


def test_the_gap_of_engine_and_trainer_stands_below_each_turn_that_was_trained(
    tmp_path: Path,
) -> None:
    turns = [RolloutTurn("assistant", f"turn {number}", True) for number in range(3)]
    with RunFolder(tmp_path, "run").acquired() as run:
        run.write_config("{}\n")
        gaps = ((0.0021, 0.034), None, (float("nan"), 2.5))
        run.rollouts.write(1, [replace(member(0, *turns), gaps=gaps), member(1, *turns)], {})
    trained, other = (one["cells"] for one in group(run)["members"])
    assert [cell["gap"] for cell in trained] == [[0.0021, 0.034], None, [None, 2.5]]
    assert [cell["gap"] for cell in other] == [None] * 3
    html = write_page(run.path, None, groups=10).read_text(encoding="utf-8")
    said = re.findall("engine and trainer differ by ([^<]+)<", html)
    assert said == ["0.0021, at most 0.034", "–, at most 2.5"]


def test_the_effect_of_another_picture_stands_below_the_turn_that_was_scored(
    tmp_path: Path,
) -> None:
    turns = [RolloutTurn("assistant", f"turn {number}", True) for number in range(2)]
    with RunFolder(tmp_path, "run").acquired() as run:
        run.write_config("{}\n")
        scored = replace(member(0, *turns), sight=(None, 0.75))
        run.rollouts.write(1, [scored, member(1, *turns)], {})
    html = write_page(run.path, None, groups=10).read_text(encoding="utf-8")
    assert re.findall("with another picture less likely by ([^<]+)<", html) == ["0.75"]


def test_the_advantage_of_each_turn_stands_below_it_where_turns_differ(tmp_path: Path) -> None:
    turns = [RolloutTurn("assistant", f"turn {number}", True) for number in range(3)]
    with RunFolder(tmp_path, "run").acquired() as run:
        run.write_config("{}\n")
        run.rollouts.write(
            1, [replace(member(0, *turns), advantages=(0.5, -1.25, 2.0)), member(1, *turns)], {}
        )
    by_turn, whole = (one["cells"] for one in group(run)["members"])
    assert [cell["advantage"] for cell in by_turn] == [0.5, -1.25, 2.0]
    assert [cell["advantage"] for cell in whole] == [None] * 3
    html = write_page(run.path, None, groups=10).read_text(encoding="utf-8")
    assert re.findall('as trained">advantage ([^<]+)<', html) == ["0.5", "-1.25", "2"]


class Tags(HTMLParser):
    """Collects the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def hostile(tmp_path: Path) -> RunFolder:
    """Markup, a megabyte, right-to-left text, broken UTF-8, half a surrogate, a picture that is
    gone, quotes in names.
    """
    says = (
        NASTY,
        "long " * 210_000,
        "\u202eright to left \u05e9\u05dc\u05d5\u05dd",
        "BROKEN",
        "HALF",
        "nul \x00 and bell \x07",
    )
    turns = [
        part
        for text in says
        for part in (RolloutTurn("assistant", text, True), RolloutTurn("user", NASTY, False))
    ]
    quoted = "a\"b'c<d>&" + NASTY
    with RunFolder(tmp_path, "run").acquired() as run:
        run.write_config("steps: 1\n")
        run.metrics.append({"step": 1, f"reward/component/{quoted.replace('/', '')}/mean": 0.5})
        one = RolloutRecord(
            1,
            0,
            0,
            quoted,
            quoted,
            NASTY,
            member(0, image="cc" * 32).images,
            tuple(turns),
            NASTY,
            1.0,
            {quoted: 1.0},
            (quoted,),
            status=NASTY,
            versions=(NASTY, NASTY),
            truth={quoted: NASTY},
            reason=NASTY,
        )
        run.rollouts.write(1, [one], {})
        file = run.rollouts.file(1)
        file.write_bytes(
            file.read_bytes()
            .replace(b"BROKEN", b"\xff\xfe broken \xc3")
            .replace(b"HALF", b"\\ud800 half")
        )
    return run


def test_no_text_of_a_run_becomes_markup(hostile: RunFolder) -> None:
    html = write_page(hostile.path, None, groups=10).read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(html)
    assert [attributes for tag, attributes in tags.found if tag == "script"] == [{}], (
        "the page's own"
    )
    assert not [tag for tag, _ in tags.found if tag in ("img", "iframe", "object", "embed")]
    assert not [
        name for _, attributes in tags.found for name in attributes if name.startswith("on")
    ]
    assert "picture not shown" in html
    assert "\ufffd\ufffd broken" in html
    assert "? half" in html
    assert len(html) < 4 * MAX_TEXT_CHARACTERS + 60_000
    assert f"({5 * 210_000 - MAX_TEXT_CHARACTERS} more characters: see the record)" in html


def test_held_out_episodes_before_and_after_are_strips_too(run: RunFolder, tmp_path: Path) -> None:
    episodes = list(run.rollouts)
    with RunFolder(tmp_path, "run").acquired() as other:
        other.write_config("steps: 4\n")
        for step, episode in ((0, episodes[2]), (4, episodes[0])):
            images = [
                {**image, "file": str(run.rollouts.path / image["file"])}
                for image in episode["images"]
            ]
            item = Item(
                "right",
                "paint-1",
                "",
                reward=float(step),
                turns=tuple(episode["turns"]),
                images=tuple(images),
            )
            other.evaluations.write(
                step, [item, replace(item, task=f"only-{step}"), replace(item, arm="sampled")], {}
            )
    (pair,) = content(other, groups=0)["compared"]
    assert [(one["sample"], one["reward"], len(one["cells"])) for one in pair["members"]] == [
        ("step 0", 0.0, 3),
        ("step 4", 4.0, 3),
    ]
    assert pair["members"][1]["cells"][0]["marks"]


def test_the_pairs_go_from_the_largest_gain_to_the_largest_loss_and_the_first_is_open(
    tmp_path: Path,
) -> None:
    with RunFolder(tmp_path, "run").acquired() as run:
        run.write_config("steps: 4\n")
        for step, rewards in ((0, (0.0, 1.0, 0.0, None)), (4, (0.0, 0.0, 1.0, 0.5))):
            run.evaluations.write(
                step,
                [Item("right", f"t{n}", "", reward=reward) for n, reward in enumerate(rewards)],
                {},
            )
    assert [pair["task"] for pair in content(run, groups=0)["compared"]] == ["t2", "t3", "t0", "t1"]
    html = page(content(run, groups=0))
    assert (
        html.index('<details class="group panel" open>')
        < html.index("t2")
        < html.index('<details class="group panel">')
    )


def test_another_writer_of_older_runs_is_read_too(tmp_path: Path) -> None:
    """Neither log-probs nor states nor reasons: nothing is shaded, and nobody parts."""
    with RunFolder(tmp_path, "run").acquired() as run:
        run.write_config("steps: 1\n")
        run.rollouts.write(
            1, [member(s, RolloutTurn("assistant", f"says {s}", True)) for s in (0, 1)], {}
        )
        new, lines = ("states", "reason", "logprobs"), []
        for record in run.rollouts:
            turns = [
                {key: value for key, value in turn.items() if key not in new}
                for turn in record["turns"]
            ]
            lines.append(
                json.dumps(
                    {
                        **{key: value for key, value in record.items() if key not in new},
                        "turns": turns,
                    }
                )
            )
        RolloutDump(run.rollouts.path).file(1).write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = group(run)
    assert (found["parts"], found["members"][1]["cells"][0]["runs"]) == (
        None,
        [{"text": "says 1", "shade": 0, "least": None}],
    )
    assert "says 1" in write_page(run.path, None, groups=10).read_text(encoding="utf-8")
