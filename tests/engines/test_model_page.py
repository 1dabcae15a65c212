"""docs/bring_your_own/model.md: the model of the page is made as it says, and can be tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.pages import ROOT, write_snippets
from tests.support.warm import rayloop

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
    made = subprocess.run(
        [sys.executable, "make_model.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    tried = rayloop(("try", "sums.yaml"), tmp_path)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "<|user|>Add: 1 2<|end|><|assistant|>" in tried.stdout
    assert "2 of 2 answers have a reward" in tried.stdout
