"""docs/bring_your_own/environment.md and tool.md: every snippet is written to its file and run, as
a reader would.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import DataFailure
from rayloop.core.types import Message, Task
from rayloop.envs.tools import ToolCalls
from tests.support.warm import rayloop

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"^```(\w*)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("environment", "tool")


def snippets() -> list[tuple[str, str, str]]:
    pages = [
        (ROOT / f"docs/bring_your_own/{page}.md").read_text(encoding="utf-8") for page in PAGES
    ]
    return [found for page in pages for found in SNIPPET.findall(page)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the pages' files, whose modules can be imported."""
    for language, name, text in snippets():
        assert name, f"a snippet of {language} has no file, so nothing would run it"
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def command(folder: Path, *words: str) -> str:
    done = rayloop(words, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_implementation_is_short() -> None:
    for language, name, text in snippets():
        if language == "python":
            assert len([line for line in text.splitlines() if line.strip()]) < 40, name


def test_the_environment_does_what_its_page_says(folder: Path) -> None:
    queries: Any = import_module("queries")
    tables = {
        "tables": (
            "create table fruit(name, price); insert into fruit values ('fig', 3), ('kiwi', 1)"
        )
    }
    database = queries.Queries(queries.Queries.Settings(rows=1))
    messages = (Message("user", ("Which?",)),)
    assert database.reset(Task("t", messages, "kiwi", extra=tables)).messages == messages
    rows = database.step("select name from fruit order by price")
    assert (rows.observation.messages[0].parts, rows.error, rows.done) == (
        ("[('kiwi',)]",),
        None,
        False,
    )
    assert database.step("select").error.startswith("Error: ")
    assert database.step("kiwi").done
    assert database.evaluate() == 1.0
    database.close()
    with pytest.raises(DataFailure, match="its tables cannot be made"):
        queries.Queries(queries.Queries.Settings()).reset(Task("t", ()))


@pytest.mark.parametrize(
    ("name", "row"),
    [("queries", "1"), ("mixed", "1"), ("mixed", "2"), ("rates", "1"), ("looking", "1")],
)
def test_the_rows_of_each_configuration_can_be_tried(
    folder: Path, digits_model: Path, name: str, row: str
) -> None:
    rows = folder / f"{name}.jsonl"
    assert not rows.exists() or len(rows.read_text(encoding="utf-8").splitlines()) == 2
    reported = command(folder, "try", f"{name}.yaml", "--row", row, f"model.path={digits_model}")
    assert "2 of 2 answers have a reward" in reported
    silent = "the chat template shows none of the tools: convert (docs/bring_your_own/tool.md)"
    assert (silent in reported) == (name == "rates")


def test_the_template_of_the_page_shows_the_tools(folder: Path, digits_model: Path) -> None:
    shutil.copytree(digits_model, folder / "model")
    template = folder / "model/chat_template.jinja"
    template.write_text(
        (folder / "tools.jinja").read_text(encoding="utf-8") + template.read_text(encoding="utf-8"),
        encoding="utf-8",
    )
    reported = command(folder, "try", "rates.yaml", "model.path=model")
    assert '"function": {"name": "convert"' in reported
    assert "the chat template shows none" not in reported
    assert "2 of 2 answers have a reward" in reported


@pytest.mark.parametrize(
    ("name", "said"),
    [("queries_by_hand", "[('kiwi',), ('fig',)]\n1.0\n"), ("convert_by_hand", "2.40 dollars\n")],
)
def test_what_is_played_by_hand_says_what_its_page_says(folder: Path, name: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_rows_of_an_unknown_kind_are_refused_by_line(folder: Path, digits_model: Path) -> None:
    (folder / "mixed.jsonl").write_text(
        (folder / "mixed.jsonl").read_text(encoding="utf-8").replace('"talk"', '"tlak"'),
        encoding="utf-8",
    )
    done = rayloop(("data", "validate", "mixed.yaml", f"model.path={digits_model}"), folder)
    assert done.returncode == 2
    assert (
        "mixed.jsonl:2: the row names the environment 'tlak', and environment.kinds has database,"
        " talk" in done.stderr
    )


def called(environment: ToolCalls, name: str, arguments: str) -> tuple[Any, str | None]:
    step = environment.step(
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    )
    assert step.observation is not None
    return step.observation.messages[0].parts[0], step.error


def test_the_tool_does_what_its_page_says(folder: Path) -> None:
    settings = {"tools": [{"use": "rates:Convert", "with": {"rate": 1.2}}], "role": "user"}
    environment = ToolCalls(ToolCalls.Settings.model_validate(settings))
    environment.reset(Task("t", ()))
    assert [tool.name for tool in environment.tools] == ["convert"]
    assert called(environment, "convert", '{"euros": 2}') == ("2.40 dollars", None)
    for arguments, complaint in (
        ('{"euros": -1}', "an amount of euros is not negative"),
        ('{"euros": "two"}', "the argument 'euros' of convert must be of type number, not 'two'"),
        ("{}", "convert needs the argument 'euros'"),
        ('{"euros": 1, "cents": 5}', "convert knows no argument 'cents'; it has: euros"),
    ):
        assert called(environment, "convert", arguments) == (f"Error: {complaint}", complaint)
    assert environment.step("2.40").done
    silent = ToolCalls(ToolCalls.Settings.model_validate({**settings, "describe": "nowhere"}))
    silent.reset(Task("t", ()))
    assert silent.tools == ()


def test_tools_of_an_environment_of_ones_own_get_checked_arguments(folder: Path) -> None:
    """A wrong argument is the policy's mistake there too, not the environment's."""
    hidden: Any = import_module("hidden")
    environment = hidden.Hidden(hidden.Hidden.Settings(most=5))
    environment.reset(Task("t", (), "7"))
    assert called(environment, "compare", '{"number": 4}') == ("too small", None)
    complaint = "the argument 'number' of compare must be of type integer, not 'four'"
    assert called(environment, "compare", '{"number": "four"}') == (
        f"Error: {complaint}",
        complaint,
    )
    assert environment.step("5").done
    assert environment.evaluate() == 1.0
