"""The command line: what words mean, without running anything."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rayloop import __main__ as start
from rayloop.cli import COMMANDS, main, parsed, parser
from rayloop.commands.eval import evaluation_folder
from rayloop.config.settings import load
from rayloop.core.failures import ConfigError
from rayloop.engines.shape import ModelSource
from rayloop.run.config import RunConfig
from rayloop.run.preflight import Prepared, preflight, prepare

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes/digits/quickstart.yaml"

RUN: dict[str, Any] = {
    "name": "mine",
    "steps": 1,
    "model": {"path": "nowhere"},
    "data": {"train": "nowhere.jsonl"},
    "output": "out",
    "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
}


@pytest.mark.parametrize(
    ("checkpoint", "folder"),
    [
        (None, "out/mine-eval"),
        ("runs/other", "{}/runs/other-eval"),
        ("runs/other/checkpoints/step_000003", "{}/runs/other-eval"),
        ("models/qwen", "out/qwen-eval"),
    ],
)
def test_an_evaluation_is_kept_beside_the_run_whose_checkpoint_it_measures(
    tmp_path: Path, checkpoint: str | None, folder: str
) -> None:
    (tmp_path / "runs/other/checkpoints/step_000003").mkdir(parents=True)
    (tmp_path / "runs/other/config.yaml").write_text("name: other", encoding="utf-8")
    (tmp_path / "models/qwen").mkdir(parents=True)
    named = None if checkpoint is None else tmp_path / checkpoint
    assert evaluation_folder(RunConfig.model_validate(RUN), named) == Path(folder.format(tmp_path))


def test_a_checkpoint_of_a_run_with_a_revision_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder has no revisions."""
    seen: list[RunConfig] = []

    def preflight(prepared: Prepared, trains: bool, reads: Sequence[str]) -> Prepared:
        seen.append(prepared.config)
        return prepared

    monkeypatch.setattr("rayloop.commands.eval.preflight", preflight)
    monkeypatch.setattr("rayloop.cluster.stages.evaluate.evaluate", lambda prepared, *_, **__: 0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        json.dumps({**RUN, "model": {"path": "owner/name", "revision": "main"}}), encoding="utf-8"
    )
    arguments = [
        "eval",
        str(tmp_path / "run.yaml"),
        "--data",
        "rows.jsonl",
        "--checkpoint",
        str(tmp_path / "model"),
    ]
    assert main(arguments) == 0, capsys.readouterr().err
    assert (seen[0].model.path, seen[0].model.revision) == (str(tmp_path / "model"), None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tarin", "mine.yaml"], "unknown command 'tarin'; did you mean `train`?"),
        (["train", "mine.yml"], "did you mean `mine.yaml`?"),
        (["env", "list", "miniwbo"], "did you mean `miniwob`?"),
        (["env", "play", "scripted:three-turn"], "did you mean `three-turns`?"),
    ],
)
def test_a_word_that_is_nearly_right_is_answered_with_the_right_one(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("name: mine\n", encoding="utf-8")
    with suppress(SystemExit):
        assert main(words) == 2
    assert said in capsys.readouterr().err


def test_an_option_that_does_not_exist_points_to_the_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "run.yaml", "--limit", "40"])
    said = capsys.readouterr().err
    assert "unrecognized arguments: --limit" in said
    assert "Values of the configuration are set as key.sub=value" in said


def command(folder: Path, *words: str, module: str = "rayloop") -> tuple[int, str]:
    """Exit code and output of ``python -m rayloop`` in a folder of a person's own."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["rayloop", "rayloop.cluster"])
def test_folders_and_modules_of_a_project_may_have_the_names_of_our_folders(
    tmp_path: Path, module: str
) -> None:
    for name in ("recipes", "benchmarks", "judge", "tests", "cluster", "serve_apps"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "raise RuntimeError('imported in place of ours')", encoding="utf-8"
        )
    (tmp_path / "actors.py").write_text(
        "raise RuntimeError('imported in place of ours')", encoding="utf-8"
    )
    code, text = command(tmp_path, "train", "absent.yaml", module=module)
    assert code == 2
    assert "absent.yaml" in text
    assert "in place of" not in text


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reported in (
        (["--version"], r"^rayloop \S+, ray [\d.]+, torch [\d.]+"),
        (["--help"], r"python -m rayloop try \S+\.yaml"),
        (["slurm", "--help"], "render"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
        assert re.search(reported, capsys.readouterr().out)


def test_train_without_a_configuration_asks_for_that_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert "the following arguments are required: CONFIG\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "positional", "option"),
    [
        (["doctor", "--port", "8265", "run.yaml"], ("config", Path("run.yaml")), ("port", [8265])),
        (["doctor", "--port", "1", "--port", "2"], ("config", None), ("port", [1, 2])),
        (
            ["judge", "calibrate", "--gate", "min_kappa=0.7", "auto"],
            ("url", "auto"),
            ("gate", ["min_kappa=0.7"]),
        ),
        (
            ["train", "run.yaml", "--insecure", "steps=3"],
            ("config", Path("run.yaml")),
            ("overrides", ["steps=3"]),
        ),
    ],
)
def test_options_leave_the_words_behind_them_alone(
    words: list[str], positional: tuple[str, Any], option: tuple[str, Any]
) -> None:
    found = vars(parsed(words))
    assert found[positional[0]] == positional[1]
    assert found[option[0]] == option[1]


def test_a_key_of_a_section_below_is_named_with_its_whole_path() -> None:
    reported = (
        r"algorithm\.max_staleness: unknown key; it is a key of"
        r" algorithm\.staleness\.max_staleness\."
    )
    with pytest.raises(ConfigError, match=reported):
        load(QUICKSTART, ["algorithm.max_staleness=1"], RunConfig)


@pytest.mark.parametrize(
    ("removed", "why"),
    [("tokenizer.json", "has no tokenizer.json"), ("chat_template.jinja", "chat template")],
)
def test_a_model_without_tokenizer_or_template_is_refused_before_anything_starts(
    tmp_path: Path, text_folder: Path, removed: str, why: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_folder, folder)
    (folder / removed).unlink()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    config = {
        **RUN,
        "model": {"path": str(folder)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
    }
    with pytest.raises(ConfigError, match=why):
        preflight(prepare(RunConfig.model_validate(config)))


@pytest.mark.parametrize("content", ["", "[]", "not JSON"])
def test_a_model_whose_configuration_is_damaged_is_refused_before_anything_starts(
    tmp_path: Path, text_folder: Path, content: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_folder, folder)
    (folder / "config.json").write_text(content, encoding="utf-8")
    config = RunConfig.model_validate({**RUN, "model": {"path": str(folder)}})
    for asked in (lambda: preflight(prepare(config)), lambda: ModelSource(str(folder)).shape):
        with pytest.raises(ConfigError, match=r"config\.json"):
            asked()


def test_an_interrupt_while_modules_are_imported_is_no_traceback() -> None:
    script = """
import sys

class Interrupted:
    def __getattr__(self, name):
        raise KeyboardInterrupt

sys.modules["rayloop.cli"] = Interrupted()
from rayloop.__main__ import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "rayloop: interrupted\n")


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_a_component_whose_module_imports_ray_finds_rays_variables_set(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray reads them when it is imported: too late, and the actors of this run refuse its calls."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "imports_ray", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imports_ray.py").write_text(
        "import os\nfrom pathlib import Path\n\nmode = os.environ.get('RAY_AUTH_MODE')\n"
        "raise RuntimeError(f'RAY_AUTH_MODE is {mode}')\n",
        encoding="utf-8",
    )
    if command == "sft":
        config: dict[str, Any] = {
            "model": {"path": "nowhere"},
            "output": "out",
            "steps": 1,
            "optimizer": {"lr": 1e-3},
            "data": {"train": "nowhere.jsonl"},
            "answers": {"use": "imports_ray:Answers"},
        }
    else:
        config = {**RUN, "reward": {"source": {"use": "imports_ray:Reward"}}}
    (tmp_path / "mine.yaml").write_text(json.dumps(config), encoding="utf-8")
    assert main([command, str(tmp_path / "mine.yaml")]) == 2
    assert "RAY_AUTH_MODE is token" in capsys.readouterr().err


def test_a_python_without_the_environment_says_to_activate_it() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "rayloop", "try", "run.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    wanted = "rayloop: without pydantic and ray: activate the environment: . .venv/bin/activate\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


def options(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, argparse.Action]]:
    """Every argument of a command and of its actions, with the words that lead there."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from options(below, f"{words} {name}")
        else:
            yield f"{words} {'/'.join(action.option_strings) or action.dest}", action


def of(word: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in parser([word])._actions if isinstance(a, argparse._SubParsersAction))
    found: argparse.ArgumentParser = commands.choices[word]
    return found


@pytest.mark.parametrize("word", COMMANDS)
def test_every_option_says_what_it_is_for(word: str) -> None:
    assert not [name for name, action in options(of(word), word) if not action.help]


@pytest.mark.parametrize("word", COMMANDS)
def test_no_option_swallows_the_words_that_follow(word: str) -> None:
    """An option that takes any number of words, in a command that has words of its own, would take
    those too.
    """
    found = dict(options(of(word), word))
    greedy = {
        name.rpartition(" ")[0]
        for name, a in found.items()
        if a.option_strings and a.nargs in ("*", "+")
    }
    own = {name.rpartition(" ")[0] for name, a in found.items() if not a.option_strings}
    assert not greedy & own - {"bench scale"}, (
        "give the option action=append"
    )  # of numbers; what is no number is refused by name


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """``rayloop env list | head``."""
    command = [sys.executable, "-m", "rayloop", "env", "list"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


def test_ctrl_c_while_it_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "_main", interrupted)
    assert start.main() == 1
    assert capsys.readouterr().err == "rayloop: interrupted\n"
