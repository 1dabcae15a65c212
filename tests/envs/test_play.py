"""``env play`` with a real page: what a person sees and types."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from PIL import Image

from rayloop.cli import main
from tests.envs.programs import needs

pytest.importorskip("playwright", reason="make test-env installs playwright")

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]


def test_a_page_is_played_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = "push it\nclick(start_box='(10,200)')\nAction: click(start_box='(10,200)')\nfinished()\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["env", "play", "miniwob:click-test", "--seed", "3", "--pictures", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("user: Click the button.\npicture of 160x210 pixels")
    assert "not carried out: " in said
    assert said.endswith("the episode is over\nresult: 0\n")
    assert [Image.open(file).size for file in sorted(tmp_path.iterdir())] == [(160, 210)] * 4


def test_the_last_picture_is_of_what_the_last_turn_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("click(start_box='(80,160)')\n"))
    assert main(["env", "play", "miniwob:click-test", "--seed", "3", "--pictures", str(tmp_path)]) == 0
    before, after = (Image.open(file).convert("L") for file in sorted(tmp_path.iterdir()))
    assert before.getpixel((80, 20)) == after.getpixel((80, 20)), "MiniWoB++'s dark START cover is over it"
