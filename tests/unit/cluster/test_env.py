"""``env list`` and ``env play``: what is typed, what is shown, and what an environment that fails
looks like.
"""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path

import pytest
from PIL import Image

from rayloop.cli import main
from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, EnvironmentFailed
from rayloop.core.protocols import Observation
from rayloop.core.types import Message, Task
from rayloop.envs import catalog
from rayloop.envs.catalog import FAMILIES, family, named_environment

ROOT = Path(__file__).parents[3]


def played(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["env", "play", *words])


def test_an_episode_is_played_from_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        played(
            monkeypatch,
            "one\n\ntwo\nthree\nfour\n",
            "scripted:three-turns",
            "--seed",
            "4",
            "--pictures",
            str(tmp_path),
        )
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "user: Turn 1 of seed 4."
    assert [line for line in said if line.startswith("> ")] == ["> one", "> ", "> two", "> three"]
    assert said[-2:] == ["the episode is over", "result: 1"]
    assert [Image.open(file).size for file in sorted(tmp_path.iterdir())] == [
        (56, 56),
        (80, 56),
        (120, 56),
    ]


def test_a_turn_of_several_lines_is_typed_between_fences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = 'one\n"""\n<tool_call>\n{}\n</tool_call>\n"""\nthree\n'
    assert played(monkeypatch, lines, "scripted:three-turns", "--pictures", str(tmp_path)) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("> ")] == [
        "> one",
        '> """',
        "> three",
    ]
    assert said.splitlines()[-2:] == ["the episode is over", "result: 1"]


@pytest.mark.parametrize("lines", ["", "quit\n", "one\nexit\n"])
def test_an_episode_may_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str
) -> None:
    assert played(monkeypatch, lines, "scripted:three-turns", "--pictures", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "result: 1"


def test_a_row_of_a_run_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(
        '{"prompt": "one"}\n{"prompt": "two\\u001b[2J"}\n', encoding="utf-8"
    )
    Path("run.yaml").write_text(
        "{name: mine, steps: 1, model: {path: nowhere}, data: {train: rows.jsonl}, environment:"
        " {episode: {environment: {use: 'rayloop.envs.scripted:ScriptedTool', with: {steps: [{text:"
        " no, error: not so}, {text: last, done: true}], result: 0.5}}}}, reward: {source: {use:"
        " 'rayloop.rewards.environment_result:EnvironmentResult'}}}",
        encoding="utf-8",
    )
    assert played(monkeypatch, "", "run.yaml", "data.train=elsewhere.jsonl") == 2
    assert "elsewhere.jsonl" in capsys.readouterr().err
    assert played(monkeypatch, "", "scripted:three-turns", "steps=2") == 2
    assert "scripted:three-turns is not the YAML file of a run" in capsys.readouterr().err
    assert played(monkeypatch, "a\nb\n", "run.yaml", "--row", "2") == 0
    said = capsys.readouterr().out
    assert said.startswith("user: two\\x1b[2J\n")
    assert "not carried out: not so\nuser: no\n" in said
    assert said.endswith("user: last\nthe episode is over\nresult: 0.5\n"), (
        "the last look belongs to the episode"
    )
    assert (
        played(monkeypatch, "a\nb\n", "run.yaml", "environment.episode.on_error=end", "--row", "2")
        == 0
    )
    assert capsys.readouterr().out.endswith(
        "not carried out: not so\nuser: no\nthe episode is over\nresult: 0.5\n"
    )
    assert played(monkeypatch, "", "run.yaml", "--row", "3") == 2
    assert "the usable rows 1 to 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "language", "reason"),
    [
        ("scripted:three-turns", "qwen3_vl", "environment.with.language: unknown key"),
        ("desktop:append-line", "klingon", "'klingon' is not a language; there are aguvis"),
    ],
)
def test_a_language_that_cannot_be_typed_is_refused(
    name: str, language: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "play", name, "--language", language]) == 2
    assert reason in capsys.readouterr().err


def test_every_family_is_listed_with_its_first_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    said = capsys.readouterr().out
    assert all(f"{word}: " in said for word in FAMILIES)
    assert main(["env", "list", "scripted"]) == 0
    assert capsys.readouterr().out.endswith("\n  scripted:three-turns\n")


def test_a_family_whose_packages_are_missing_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        catalog, "FAMILIES", {"gone": lambda: importlib.import_module("no_such_package")}
    )
    with pytest.raises(ConfigError, match="gone: No module named 'no_such_package'"):
        family("gone")
    with pytest.raises(ConfigError, match="no environments are called 'scripted'; there are gone"):
        named_environment("scripted:three-turns", 0)


def test_a_wrong_name_is_answered_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match="scripted has no 'three'; there is three-turns"):
        named_environment("scripted:three", 0)


@pytest.mark.parametrize("word", FAMILIES)
def test_equal_seeds_give_equal_tasks(word: str) -> None:
    if word == "miniwob":
        pytest.importorskip("miniwob", reason="its pages come with the extra browser")
    found = family(word)
    name = next(iter(found.names))
    assert found.environment_and_task(name, 3) == found.environment_and_task(name, 3)
    assert found.environment_and_task(name, 3)[1].id != found.environment_and_task(name, 4)[1].id


def checked(
    folder: Path, steps: str, *words: str, rows: str = '{"prompt": "one"}\n{"prompt": "two"}\n'
) -> int:
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    environment = f"environment: {{episode: {{environment: {steps}}}}}"
    reward = "reward: {source: {use: 'rayloop.rewards.environment_result:EnvironmentResult'}}"
    run = (
        f"{{name: mine, steps: 1, model: {{path: nowhere}}, data: {{train: {folder}/rows.jsonl}},"
        f" {environment}, {reward}}}"
    )
    (folder / "run.yaml").write_text(run, encoding="utf-8")
    return main(["env", "check", str(folder / "run.yaml"), *words])


def test_the_environments_of_a_run_are_started_and_reset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        checked(
            tmp_path,
            "{use: 'rayloop.envs.scripted:ScriptedTool', with: {steps: [{text: more}]}}",
            "--count",
            "5",
        )
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" in ")[0] for line in said] == [
        f"round {number}: 5 of 5 environments ready" for number in (1, 2)
    ]
    assert checked(tmp_path, "{use: 'rayloop.envs.scripted:ScriptedTool'}", "--count", "0") == 2


class Broken:
    """An environment whose reset raises on one task, and whose close always does."""

    class Settings(SettingsModel): ...

    def __init__(self, settings: Broken.Settings) -> None: ...

    def reset(self, task: Task) -> Observation:
        if "one" in str(task.messages):
            raise KeyError("column")
        return Observation((Message("user", ("go",)),))

    def step(self, text: str) -> None: ...

    def evaluate(self) -> None: ...

    def close(self) -> None:
        raise ZeroDivisionError("no machine")


def test_bugs_of_an_environment_are_counted_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path, f"{{use: '{__name__}:Broken'}}", "--count", "4", "--rounds", "1") == 1
    said = capsys.readouterr().out
    assert "round 1: 2 of 4 environments ready in " in said
    assert "  2 not ready: KeyError: 'column'\n" in said
    assert "  4 not closed: ZeroDivisionError: no machine\n" in said, "beside the first reason"


class Odd(Broken):
    """An environment whose text steers a terminal, and which shows nothing."""

    def reset(self, task: Task) -> Observation:
        if "one" in str(task.messages):
            raise EnvironmentFailed("\x1b[2Jgone")
        return Observation(())

    def close(self) -> None: ...


def test_an_empty_observation_and_a_foreign_text_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path, f"{{use: '{__name__}:Odd'}}", "--count", "2", "--rounds", "1") == 1
    said = capsys.readouterr().out
    assert "1 not ready: reset gave an Observation without a message\n" in said
    assert r"1 not ready: EnvironmentFailed: \x1b[2Jgone" in said


def test_rows_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = '{"prompt": "one"}\n{"prompt": 5}\n'
    assert (
        checked(
            tmp_path,
            "{use: 'rayloop.envs.scripted:ScriptedTool', with: {steps: [{text: more}]}}",
            rows=rows,
        )
        == 0
    )
    assert f"left out: {tmp_path}/rows.jsonl:2: " in capsys.readouterr().out


class Missing(Broken):
    """An environment whose program is not installed."""

    def __init__(self, settings: Broken.Settings) -> None:
        raise EnvironmentFailed('a game is not installed: pip install "game"')


def test_what_is_not_ready_is_counted_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path, f"{{use: '{__name__}:Missing'}}", "--count", "3", "--rounds", "1") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "round 1: 0 of 3 environments ready"
    assert (
        said[1] == '  3 not ready: EnvironmentFailed: a game is not installed: pip install "game"'
    )
