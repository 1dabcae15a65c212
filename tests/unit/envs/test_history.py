"""What the policy is shown of its past: each policy, its contexts, and what is trained of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, EnvironmentFailed
from rayloop.core.protocols import TrainItem
from rayloop.core.types import EndReason, Message, Trajectory
from rayloop.envs.episode import summarize
from rayloop.envs.grammar.language import action_format
from rayloop.envs.history.past import AnswerReader, Past, PastAnswer, Shown
from rayloop.envs.history.policies import (
    FORGOTTEN,
    WINDOW,
    EpisodeHistory,
    Window,
    built,
    shows_everything,
)
from rayloop.envs.settings import EnvironmentKind
from rayloop.grpo.batch import by_segment, segmented
from rayloop.rollout.plain import plain_trajectory, trajectory_from_plain
from rayloop.run.sections import EnvironmentSettings
from tests.support.runs import ROOT
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.envs.test_episode import END, TASK, run, scripted

THOUGHTS = "{action}"


@pytest.fixture(scope="module")
def renderer(vision_folder: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(vision_folder)), 1_000_000)


def screen(number: int) -> dict[str, Any]:
    return {"text": f"screen {number}", "images": [{"width": 56, "height": 28 * (number + 1)}]}


def window(**settings: Any) -> EpisodeHistory:
    return EpisodeHistory(Window(Window.Settings.model_validate(settings)))


def played(
    renderer: Renderer, history: EpisodeHistory, turns: int = 6, **settings: Any
) -> tuple[Trajectory, ScriptedEngine]:
    chosen = {"max_turns": 20, "max_tokens": 2000, "max_images": 20, **settings}
    said = [(f"thought {number}</think> look {number}", END) for number in range(turns + 1)]
    steps = map(screen, range(turns))
    return run(renderer, scripted(*steps), said, history=history, **chosen)


HISTORIES = {
    "full": window(),
    "drop_thoughts": window(answers=THOUGHTS),
    "last_images": window(last_images=2),
    "last_turns": window(last_turns=3),
    "last_turns_1": window(last_turns=1),
    "both": window(last_images=2, last_turns=3, answers=THOUGHTS),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_every_sampled_token_is_trained_once_where_it_was_sampled(
    renderer: Renderer, history: EpisodeHistory
) -> None:
    trajectory, engine = played(renderer, history)
    assert trajectory.end_reason is EndReason.DONE
    seen = iter(engine.requests)
    sampled = 0
    for segment in trajectory.segments:
        flat = segment.flatten()
        assert not flat.loss_mask[0]
        images = list(segment.images)
        for turn in segment.sampled_turns:
            prompt, _ = next(seen)
            whole = (*prompt.token_ids, *turn.token_ids)
            assert tuple(flat.token_ids[: len(whole)]) == whole
            assert flat.loss_mask[len(prompt.token_ids) : len(whole)].all()
            assert [image.ref for image in prompt.images] == images[: len(prompt.images)]
            tokens = sum(image.ref.tokens for image in prompt.images)
            assert prompt.token_ids.count(renderer.image_token or 0) == tokens
        sampled += int(flat.loss_mask.sum())
    assert next(seen, None) is None
    assert sampled == trajectory.sampled_tokens > 0
    assert set(trajectory.image_bytes) == {image.sha256 for image in trajectory.images}


def test_older_images_become_words_and_the_policys_turns_stay(renderer: Renderer) -> None:
    _, engine = played(renderer, HISTORIES["last_images"])
    # The image of the task's row stays, beside the last two of the environment.
    heights = [[shown.ref.height for shown in prompt.images] for prompt, _ in engine.requests]
    assert heights[:3] == [[56], [56, 28], [56, 28, 56]]
    assert heights[3:5] == [[56, 56, 84], [56, 84, 112]]
    text = renderer.decode(engine.requests[4][0].token_ids)
    order = ["Click the button", "look 0", "screen 0" + FORGOTTEN, "look 1", "screen 2", "look 3"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert text.count(FORGOTTEN) == 2


def test_older_turns_become_a_list_behind_the_task(renderer: Renderer) -> None:
    trajectory, engine = played(renderer, HISTORIES["last_turns"])
    heights = [[shown.ref.height for shown in prompt.images] for prompt, _ in engine.requests]
    assert heights == [
        [56],
        [56, 28],
        [56, 28, 56],
        [56, 28, 56, 84],
        [56, 56, 84, 112],
        [56, 84, 112, 140],
        [56, 112, 140, 168],
    ]
    text = renderer.decode(engine.requests[4][0].token_ids)
    listed = "Previous actions:\nStep 1: look 0\nStep 2: look 1\nscreen 1"
    assert listed in text
    assert "thought 1" not in text
    assert "thought 2</think> look 2" in text
    assert len(trajectory.segments) == 5


def test_thoughts_are_dropped_and_the_actions_are_context(renderer: Renderer) -> None:
    trajectory, engine = played(renderer, HISTORIES["drop_thoughts"])
    text = renderer.decode(engine.requests[-1][0].token_ids)
    assert "thought" not in text
    assert text.count("look") == 6
    assert len(trajectory.segments) == 7


def test_answers_without_a_thought_leave_one_context(renderer: Renderer) -> None:
    said = [(f"look {number}", END) for number in range(3)]
    trajectory, _ = run(
        renderer,
        scripted(screen(0), screen(1)),
        said,
        history=window(answers=THOUGHTS),
        max_tokens=2000,
    )
    assert len(trajectory.segments) == 1


def test_what_the_driver_knows_counts_an_image_once(renderer: Renderer) -> None:
    for history in HISTORIES.values():
        summary = summarize(played(renderer, history)[0], TASK, 1.0, renderer.image_token)
        assert (summary.images, summary.observation_images) == (7, 6)
        assert summary.images_consistent


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_anchor_states_do_not_depend_on_the_history(
    renderer: Renderer, history: EpisodeHistory
) -> None:
    trajectory, _ = played(renderer, history)
    whole, _ = played(renderer, HISTORIES["full"])
    assert trajectory.states == whole.states
    assert len(set(trajectory.states)) == 7


@pytest.mark.parametrize(
    ("history", "settings", "reason", "turns"),
    [
        ("full", {"max_images": 4}, EndReason.MAX_IMAGES, 4),
        ("last_images", {"max_images": 3}, EndReason.DONE, 7),
        ("last_images", {"max_images": 2}, EndReason.MAX_IMAGES, 2),
        ("full", {"max_tokens": 200}, EndReason.OVER_LENGTH, 4),
        ("last_turns_1", {"max_tokens": 200}, EndReason.DONE, 7),
    ],
)
def test_limits_hold_for_each_context(
    renderer: Renderer, history: str, settings: dict[str, Any], reason: EndReason, turns: int
) -> None:
    trajectory, engine = played(renderer, HISTORIES[history], **settings)
    assert (trajectory.end_reason, len(engine.requests)) == (reason, turns)


def test_it_survives_a_checkpoint(renderer: Renderer) -> None:
    trajectory, _ = played(renderer, HISTORIES["last_turns_1"])
    assert trajectory_from_plain(plain_trajectory(trajectory)) == trajectory


def test_a_segment_is_trained_with_its_part_of_the_reference(renderer: Renderer) -> None:
    trajectory, _ = played(renderer, HISTORIES["last_images"])
    n = trajectory.sampled_tokens
    item = TrainItem(trajectory, 0.5, np.arange(n), lag=2)
    first, second = segmented([[item], [item]])
    assert [part.trajectory for part in first] == list(trajectory.segments)
    assert all(a.trajectory is b.trajectory for a, b in zip(first, second, strict=True))
    assert np.concatenate([part.ref_logprobs for part in first]).tolist() == list(range(n))
    for part in first:
        assert len(part.ref_logprobs) == part.trajectory.flatten().loss_mask.sum()
        assert (part.advantage, part.lag) == (0.5, 2)
    with pytest.raises(ValueError, match=f"3 reference log-probs for {n} sampled tokens"):
        segmented([[dataclasses.replace(item, ref_logprobs=[0, 0, 0])]])
    scored = by_segment(
        [trajectory, trajectory],
        lambda parts: [p.flatten().rollout_logprobs[p.flatten().loss_mask] for p in parts],
    )
    assert [len(array) for array in scored] == [n, n]


class Reversing:
    """Shows the answers in the wrong order."""

    def shown(self, past: Past) -> Shown:
        answers = [exchange.answer for exchange in past.exchanges]
        return [*past.first, *answers[::-1], Message("user", ("now",))]


class Inventing:
    """Shows an answer with another text under its number."""

    def shown(self, past: Past) -> Shown:
        invented = [
            dataclasses.replace(exchange.answer, text="other") for exchange in past.exchanges
        ]
        return [*past.first, *invented, Message("user", ("now",))]


class Ending:
    """Ends with an answer."""

    def shown(self, past: Past) -> Shown:
        return [*past.first, *(exchange.answer for exchange in past.exchanges)]


class Raising:
    def shown(self, past: Past) -> Shown:
        return [past.exchanges[1].answer]


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (Reversing(), "answers that it was not given, or not in their order"),
        (Inventing(), "answers that it was not given"),
        (Ending(), "no message of another role than assistant at the beginning and at the end"),
        (Raising(), "the history Raising raised IndexError"),
    ],
)
def test_a_policy_that_breaks_the_contract_is_named(
    renderer: Renderer, history: Any, message: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=message):
        played(renderer, EpisodeHistory(history))


def test_a_language_tells_thought_and_action_apart() -> None:
    text = "Thought: I press it.\nAction: click(start_box='(12,34)')"
    answer = AnswerReader("ui_tars").answer(0, text)
    assert (answer.action, answer.text) == ("Action: click(start_box='(12,34)')", text)
    unreadable = AnswerReader("ui_tars").answer(1, "<think>hm</think> no action")
    assert unreadable.action == "no action"
    call = '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [1, 2]}}'
    turn = f"Thought: here\nAction: Press OK.\n<tool_call>\n{call}\n</tool_call>"
    assert AnswerReader("qwen3_vl").answer(0, turn) == PastAnswer(
        0, turn, f"Action: Press OK.\n<tool_call>\n{call}\n</tool_call>", "Press OK."
    )


def test_words_in_braces_that_the_policy_wrote_stay(renderer: Renderer) -> None:
    past = Past((Message("user", ("task",)),))
    answer = AnswerReader().answer(0, "type {number}")
    past = past.followed_by(answer, [Message("user", ("next",))])
    shown = Window(Window.Settings(last_turns=1)).shown(past)
    assert shown == [
        Message("user", ("task", "\nPrevious actions:\nStep 1: type {number}\n", "next"))
    ]


SOURCED = {
    "ui_tars": (),
    "aguvis": (),
    "anthropic_computer": (),
    "cogagent": (),
    "glm_v": ("computer",),
    "gui_owl": ("1.5",),
    "internvl": (),
    "mobilegym": ("V2",),
    "opencua": (),
    "openwebrl": (),
    "qwen2_5_vl": (),
    "qwen3_vl": ("computer",),
    "webgym": ("qwen",),
}
"""Where tests/data/languages has the number of images that a family's makers show."""


@pytest.mark.parametrize("name", SOURCED)
def test_a_languages_history_has_the_images_of_its_source(name: str) -> None:
    facts = yaml.safe_load((ROOT / f"tests/data/languages/{name}.yaml").read_text())["history"]
    for key in SOURCED[name]:
        facts = facts[key]
    settings = Window.Settings.model_validate(action_format(name).history("computer"))
    assert (settings.last_images or settings.last_turns) == facts["images"]
    assert settings.last_images is None or settings.last_turns is None


@pytest.mark.parametrize(
    ("language", "device", "expected"),
    [
        ("qwen3_vl", "Computer", {"last_turns": 4}),
        ("qwen3_vl", "Phone", {"last_turns": 1}),
        ("qwen3_vl", "Page", {"last_turns": 1}),
        ("gui_owl", "Phone", {"last_turns": 5, "step": "Step{number}: {summary}"}),
        ("qwen3_5", "Phone", {}),
        ("openai_computer", "Computer", {}),
    ],
)
def test_history_language_is_the_makers(
    language: str, device: str, expected: dict[str, Any]
) -> None:
    kind = EnvironmentKind(
        use=f"tests.unit.envs.test_history:{device}", with_={"language": language}
    )
    chosen = EnvironmentSettings.model_validate({"history": "language"}).history
    policy, spoken = built(chosen, kind)
    assert isinstance(policy, Window)
    assert policy.settings == Window.Settings.model_validate(expected)
    assert spoken == language


def test_history_language_needs_an_environment_with_one() -> None:
    chosen = EnvironmentSettings.model_validate({"history": "language"}).history
    with pytest.raises(ConfigError, match="SingleTurn has no language with a file: set full"):
        built(chosen, EnvironmentKind(use="rayloop.envs.single_turn:SingleTurn"))


@pytest.mark.parametrize(
    ("written", "settings"),
    [
        ("full", {}),
        ("drop_thoughts", {"answers": "{action}"}),
        ({"last_images": 5}, {"last_images": 5}),
        (
            {"last_turns": 4, "step": "{number}: {action}"},
            {"last_turns": 4, "step": "{number}: {action}"},
        ),
        ({"use": WINDOW, "with": {"last_images": 2}}, {"last_images": 2}),
    ],
)
def test_what_a_configuration_may_say(written: Any, settings: dict[str, Any]) -> None:
    section = EnvironmentSettings.model_validate({"history": written})
    policy = section.history.build()
    assert policy.settings == Window.Settings.model_validate(settings)
    assert shows_everything(section.history) == (written == "full")
    assert EnvironmentSettings().history == EnvironmentSettings(history="full").history
    assert EnvironmentSettings.model_validate(section.model_dump(mode="json")) == section


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("forget", "'forget' is not one of full, drop_thoughts, language"),
        ({"last_image": 5}, "last_image"),
    ],
)
def test_what_a_configuration_may_not_say(written: Any, message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        EnvironmentSettings.model_validate({"history": written}).history.build()


class Computer:
    """An environment with a language, as far as its settings go."""

    class Settings(SettingsModel):
        language: str


class Page(Computer):
    """A page that may be a phone's."""

    class Settings(Computer.Settings):
        device: str = "phone"


class Phone(Computer):
    """The same on a phone."""

    SCREEN = "phone"
