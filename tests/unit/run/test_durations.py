"""The order of all durations of a run: it holds by default, and a configuration that breaks it is
refused with keys and values.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from rayloop.config.explain import walk
from rayloop.config.yaml_source import dotted
from rayloop.core.failures import ConfigError
from rayloop.run.config import RunConfig, read
from rayloop.run.lifetime import DURATIONS, check_durations, value_of
from tests.support.runs import ROOT, settings
from tools.pages.settings import field_texts


def config(folder: Path, **changes: object) -> RunConfig:
    return RunConfig.model_validate(settings(folder, folder, **changes))


def test_the_order_holds_by_default(tmp_path: Path) -> None:
    check_durations(config(tmp_path))
    check_durations(config(tmp_path, weight_sync={"transport": {"kind": "collective"}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"recovery__stall_timeout": 3600.0},
            r"recovery\.stall_timeout \(3600 s\) must be longer than environment\.episode_timeout"
            r" \(3600 s\), "
            r"policy\.step_timeout \(3600 s\), which it waits for. Raise it, or lower what is"
            r" named",
        ),
        (
            {"policy__step_timeout": 7200.0},
            r"stall_timeout \(4500 s\) must be longer than policy\.step_timeout \(7200 s\)",
        ),
        (
            {"reward__timeout": 2400.0},
            r"stall_timeout \(4500 s\) must be longer than 2 x reward\.timeout \(4800 s\)",
        ),
        (
            {"environment__episode__step_timeout": 4000.0},
            (
                r"environment\.episode_timeout \(3600 s\) must be longer than 2 x"
                r" environment\.episode\.step_timeout \(8000 s\)"
            ),
        ),
        (
            {"recovery__start_timeout": 4500.0},
            r"recovery\.stall_timeout \(4500 s\) .* recovery\.start_timeout \(4500 s\)",
        ),
    ],
)
def test_a_wait_that_would_give_up_first_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_durations(config(tmp_path, **changes))


def test_it_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings(tmp_path, tmp_path)), encoding="utf-8")
    read(file, [])
    with pytest.raises(ConfigError, match=r"recovery\.stall_timeout \(60 s\) must be longer than"):
        read(file, ["recovery.stall_timeout=60"])


def seconds() -> set[str]:
    """The keys of a run that are seconds by their description."""
    return {
        dotted((*path, name))
        for path, model in walk(RunConfig)
        for name, info in model.model_fields.items()
        if info.annotation is float and re.match(r"Seconds\b", field_texts(model)[name])
    }


def test_every_duration_is_in_the_table() -> None:
    assert seconds() - {each.key for each in DURATIONS} == set()


def test_the_table_names_keys_that_exist(tmp_path: Path) -> None:
    known: BaseModel = config(tmp_path)
    assert [each.key for each in DURATIONS if value_of(known, each.key) is None] == []
    assert {each.within for each in DURATIONS} - {""} <= {each.key for each in DURATIONS}


def test_the_page_has_the_order() -> None:
    page = (ROOT / "docs/choosing_settings.md").read_text(encoding="utf-8")
    order = [
        line
        for line in page.splitlines()
        if line.startswith("- ") and "`recovery.stall_timeout`" in line and " < " in line
    ]
    for each in DURATIONS:
        if each.within:
            (line,) = [
                one for one in order if f"`{each.key}`" in one.rpartition(f"`{each.within}`")[0]
            ]
            assert ("twice" in line.partition(f"`{each.key}`")[0][-6:]) == (each.times == 2)
