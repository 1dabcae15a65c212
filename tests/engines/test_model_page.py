"""docs/bring_your_own/model.md: the model of the page is made as it says, and can be tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.pages import ROOT, write_snippets

RUN = """\
name: sums
steps: 1
model: {path: model}
data: {train: sums.jsonl}
rollout: {sampling: {max_tokens: 8}}
reward: {source: {use: "rewards:length"}}
"""


def test_the_model_of_the_page_answers(tmp_path: Path) -> None:
    write_snippets("bring_your_own/model.md", tmp_path)
    (tmp_path / "sums.yaml").write_text(RUN, encoding="utf-8")
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "Add: 1 2", "answer": "3"}\n', encoding="utf-8"
    )
    (tmp_path / "rewards.py").write_text(
        "def length(context):\n    return len(context.texts[-1])\n", encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in (["make_model.py"], ["-m", "rayloop", "try", "sums.yaml"]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "<|user|>Add: 1 2<|end|><|assistant|>" in done.stdout
    assert "2 of 2 answers have a reward" in done.stdout
