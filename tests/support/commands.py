"""The commands that the pages quote in full: which are executed, which another test executes, and
what the rest needs.
"""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatchcase

from tests.unit.test_docs import PAGES, WHOLE, found

TINY = (
    "algorithm.groups_per_step=2 algorithm.group_size=4 evaluation.limit=4 evaluation.samples=1"
    " evaluation.every=0"
)
"""Added to a run, so that it takes seconds."""
FEW = "evaluation.limit=4 evaluation.samples=1"
PLACES = {
    "CONFIG": "recipes/digits/quickstart.yaml",
    "RUN": "runs/quickstart",
    "RUN_DIR": "runs/quickstart",
    "DIR": "runs/data/desktop",
    "runs/NAME/checkpoints/step_000060": "runs/quickstart/checkpoints/step_000010",
}
"""Names that stand for the reader's own -> what they are here.

``mine.yaml`` and ``train.jsonl`` are made by the test.
"""
EXECUTED: tuple[tuple[str, str], ...] = (
    ("data prepare digits --out runs/data/digits", ""),
    ("sft recipes/digits/warm.yaml", ""),
    ("train recipes/digits/quickstart.yaml", f"steps=3 evaluation.every=0 {FEW}"),
    (
        (
            "eval recipes/digits/quickstart.yaml --checkpoint runs/digits --data"
            " runs/data/digits/eval.jsonl --samples 4"
        ),
        FEW,
    ),
    ("train recipes/arc_vision/quickstart.yaml", f"steps=10 {TINY}"),
    ("report runs/quickstart", ""),
    ("score arc_vision runs/quickstart/rollouts/step_000010.jsonl --reward iou", ""),
    ("score arc_vision FILE.jsonl", "FILE.jsonl:runs/quickstart/rollouts/step_000010.jsonl"),
    (
        (
            "eval recipes/arc_vision/quickstart.yaml --checkpoint runs/quickstart --controls "
            "--data recipes/arc_vision/pages/test.parquet"
        ),
        FEW,
    ),
    ("export runs/quickstart runs/models/mine", ""),
    ("status RUN", ""),
    ("status RUN_DIR", ""),
    ("train recipes/arc_vision/quickstart.yaml name=mine steps=20 policy.optimizer.lr=3e-4", TINY),
    ("estimate CONFIG", ""),
    ("estimate CONFIG --from runs/mine", ""),
    ("try CONFIG", ""),
    ("train CONFIG --print-config", ""),
    ("data validate CONFIG", ""),
    ("data validate train.jsonl", ""),
    ("train mine.yaml --print-config", ""),
    ("data validate mine.yaml", ""),
    ("estimate mine.yaml", ""),
    ("train mine.yaml", f"name=of-mine steps=2 evaluation.every=0 {FEW}"),
    ("env check mine.yaml --count 16", ""),
    ("env play mine.yaml --row 7", ""),
    ("env list", ""),
    ("env play miniwob:click-color --seed 3", ""),
    ("env play miniwob:click-dialog --seed 3", ""),
    ("train recipes/arpo/quickstart.yaml", f"steps=2 {TINY}"),
    (
        "train recipes/arpo/short.yaml --console",
        "steps=2 algorithm.groups_per_step=4 evaluation.every=0 " + FEW,
    ),
    ("report runs/arpo-short", ""),
    ("score arpo FILE.jsonl", "FILE.jsonl:runs/arpo-short/rollouts/step_000002.jsonl"),
    ("data prepare chart_rvr --out runs/data/chart_rvr", ""),
    ("train recipes/chart_rvr/quickstart.yaml", f"steps=2 {TINY}"),
    ("report runs/chart-rvr-quickstart", ""),
    (
        (
            "eval recipes/chart_rvr/quickstart.yaml --checkpoint runs/chart-rvr-quickstart --data"
            " runs/data/chart_rvr/test.jsonl --samples 4 --controls"
        ),
        FEW,
    ),
    (
        "score chart_rvr FILE.jsonl",
        "FILE.jsonl:runs/chart-rvr-quickstart/rollouts/step_000002.jsonl",
    ),
    (
        (
            "score chart_rvr tests/data/chart_rvr/completions.jsonl --variant original --reward"
            " accuracy"
        ),
        "",
    ),
    ("data prepare pyvision --out runs/data/pyvision", ""),
    ("train recipes/pyvision/quickstart.yaml", f"steps=2 {TINY}"),
    ("report runs/pyvision", ""),
    ("score pyvision FILE.jsonl", "FILE.jsonl:runs/pyvision/rollouts/step_000002.jsonl"),
    ("data prepare desktop --out DIR", ""),
    ("export runs/NAME/checkpoints/step_000060 models/carried", ""),
    (
        "train CONFIG name=another model.path=models/carried",
        f"CONFIG:recipes/arc_vision/quickstart.yaml steps=2 {TINY}",
    ),
    ("sft CONFIG", "CONFIG:recipes/digits/warm.yaml output=runs/models/again steps=2"),
    ("doctor --json", ""),
    ("doctor mine.yaml", ""),
)
"""In this order: command -> what a reader puts in place of a name (``NAME:value``), and words that
are added.
"""
BESIDE = {
    ("train recipes/digits/quickstart.yaml", "name=live steps=100000"): (
        ("policy serve --run runs/digits", "runs/digits:runs/live"),
        ("logs RUN --role ROLE", "RUN:runs/live ROLE:rollout"),
        ("stacks RUN", "RUN:runs/live"),
        ("stop RUN_DIR", "RUN_DIR:runs/live"),
    ),
    ("judge serve", ""): (
        ("judge check auto", ""),
        (
            "judge check http://HOST:8000 --key-file FILE",
            "http://HOST:8000:URL FILE:runs/judge.key",
        ),
        ("judge calibrate auto", "--gate min_accuracy=0.8 --gate min_kappa=0.5"),
    ),
    ("console runs/mine", ""): (),
}
"""A command that goes on -> what is executed beside it.

``URL`` stands for the address that the judge announced.
"""
ALL = {
    *dict(EXECUTED),
    *(command for lives, others in BESIDE.items() for command, _ in (lives, *others)),
}
ELSEWHERE = {
    "* sums.yaml*": "tests/cluster/test_own_task.py",
    "replay *": "tests/engines/test_replay.py",
    "bundle *": "tests/engines/test_replay.py",
    "report runs/sums": "tests/cluster/test_own_task.py",
    "*queries.yaml*": "tests/cluster/test_environment_pages.py",
    "try rates.yaml": "tests/cluster/test_environment_pages.py",
    "data convert *": "tests/unit/data/test_conversion.py",
    "env play agent.yaml": "tests/unit/envs/test_agent_env.py",
    "env play runs/mine --from=*": "tests/envs/test_play.py",
    "try CONFIG model.path=model": "tests/engines/test_model_page.py",
    "parity MODEL*": "tests/engines/test_parity.py",
    "policy serve --name *": "tests/serve/test_policy.py",
    "eval *mine.json*": "tests/cluster/test_protocol.py",
    "slurm *": "tests/deploy/slurm/test_slurm.py",
    "submit CONFIG output=/shared*": "tests/cluster/test_submit.py",
    "train CONFIG --address HEAD:PORT": "tests/nodes/test_node_losses.py",
    "data prepare reasoning *": "tests/adapters/test_reasoning.py",
    "train recipes/reasoning/*": "tests/adapters/test_reasoning.py",
}
"""Commands, as patterns -> the test that executes them, or their function, with what they need
besides.
"""
NEEDS = {
    "data prepare chart_chains *": "a model's server",
    "data prepare chart_rvr_train *": "rows of the Hugging Face Hub",
    "data prepare chartqa*": "rows of the Hugging Face Hub",
    "data prepare deepeyes *": "rows of the Hugging Face Hub",
    "data prepare osworld*": "a checkout of OSWorld",
    "data prepare pyvision --hub *": "rows of the Hugging Face Hub",
    "data prepare pyvision_video *": "rows of the Hugging Face Hub",
    "data prepare screenspot *": "rows of the Hugging Face Hub",
    "data prepare vstar *": "rows of the Hugging Face Hub",
    "env check recipes/arpo/presets/faithful.yaml *": "OSWorld's virtual machines",
    "eval * --benchmark *": "a GPU",
    "judge serve serve_apps/judge/configs/judge_openai.yaml": "a model's server",
    "judge serve serve_apps/judge/configs/judge_qwen2_5_72b.yaml *": "GPUs",
    "sft recipes/chart_rvr/sft.yaml": "a GPU",
    "submit *": "GPUs",
    "train recipes/*/presets/*": "GPUs",
    "try recipes/*/presets/*": "rows of the Hugging Face Hub",
    "*runs/arc-*": "a run on GPUs",
}
"""Commands, as patterns -> what they need that no test has."""


def words_of(command: str, more: str) -> list[str]:
    """The command with what stands in place of names, and the words that are added."""
    given = dict(word.rpartition(":")[::2] for word in more.split() if ":" in word)
    places = {**PLACES, **given}
    return [places.get(word, word) for word in command.split()] + [
        word for word in more.split() if ":" not in word
    ]


def quoted() -> dict[str, str]:
    """Each command that is quoted in full -> the first place; forms such as ``[CONFIG]`` are no
    commands.
    """
    commands: dict[str, str] = {}
    for _, place, match in found(WHOLE, PAGES):
        words = shlex.split(
            re.split(r"\s#| {3,}|;", re.sub(r"\\\n *", "", match[1] or match[2]))[0]
        )
        if not any(
            word[0] in "[." or "|" in word or word in ("ACTION", "RECIPE", "NAME") for word in words
        ):
            commands.setdefault(" ".join(words), place)
    return commands


def classed(command: str) -> list[str]:
    """Where it belongs: ``executed``, the test that executes it, or what it needs."""
    places = ["executed"] if command in ALL else []
    places += [test for pattern, test in ELSEWHERE.items() if fnmatchcase(command, pattern)]
    return places or [need for pattern, need in NEEDS.items() if fnmatchcase(command, pattern)][:1]
