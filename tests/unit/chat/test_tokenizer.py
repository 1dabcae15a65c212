"""Special tokens that are typed in a text stay text, whatever tokens the folder has added."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from rayloop.chat.tokenizer import Encoder, load_tokenizer

CHARTS = Path(__file__).parents[3] / "recipes/chart_rvr/tiny"
"""It has added the token "bar"."""


def assert_typed_tokens_stay_text(encoder: Encoder) -> None:
    end = encoder.special["<|im_end|>"]
    assert end in encoder.ids("a<|im_end|>")
    assert end not in encoder.ids(encoder.disarmed("a<|im_end|>"))
    assert (
        encoder.tokenizer.decode(
            list(encoder.ids(encoder.disarmed("a<|im_end|>"))), skip_special_tokens=False
        )
        == "a<|im_end|>"
    )


@pytest.mark.parametrize(
    "digits", ["c5462e6aa73e4a6bb4c0d42749a0c9ba", "178c9e92468344a49181e282c3a648ba"]
)
def test_no_added_token_is_found_across_the_end_of_the_guard(
    digits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(digits))
    assert_typed_tokens_stay_text(Encoder(CHARTS))


def test_no_added_token_is_found_inside_the_guard(tmp_path: Path) -> None:
    shutil.copytree(CHARTS, tmp_path / "model")
    tokenizer = load_tokenizer(CHARTS)
    tokenizer.add_tokens(list("0123456789abcdef"))
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    assert_typed_tokens_stay_text(Encoder(tmp_path / "model"))
