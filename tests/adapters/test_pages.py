"""docs/bring_your_own/adapters.md: its example is played, and its settings are real ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from rayloop.config.settings import load
from rayloop.core.types import Message, Task
from rayloop.envs.settings import EnvironmentKind
from rayloop.run.config import RunConfig

pytestmark = pytest.mark.adapters
PAGE = (Path(__file__).parents[2] / "docs/bring_your_own/adapters.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```\w+ title=(\S+)\n(.*?)```", PAGE, re.DOTALL))


def test_the_lake_is_played_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lake", raising=False)
    config = load(tmp_path / "lake.yaml", [], RunConfig)
    environment = config.environment.episode.environment.build()
    first = environment.reset(Task("one", (Message("user", ("Walk.",)),), extra={"seed": 3}))
    assert "field 0 of a 4 x 4 lake" in first.messages[-1].parts[0]
    for action in "221112":
        step = environment.step(action)
    assert (step.done, environment.evaluate()) == (True, 1.0)
    environment.close()


@pytest.mark.parametrize(
    "name",
    [
        "browsergym.yaml",
        "mcp.yaml",
        "nemo_gym.yaml",
        "openenv.yaml",
        "textarena.yaml",
        "verifiers.yaml",
    ],
)
def test_the_other_settings_are_real(name: str) -> None:
    kind = EnvironmentKind.model_validate(
        yaml.safe_load(FILES[name])["environment"]["episode"]["environment"]
    )
    written = yaml.safe_load(FILES[name])["environment"]["episode"]["environment"]["with"]
    assert kind.options().model_fields_set == set(written)
