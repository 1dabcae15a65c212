"""The keys themselves: no text names one that does not exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from pydantic import BaseModel

from rayloop.config.explain import keys, walk
from rayloop.config.yaml_source import dotted
from rayloop.run.config import RunConfig
from rayloop.serve_apps.settings import JudgeSettings, PolicyEndpointSettings, ServeFile
from rayloop.sft.stage import SftConfig
from tests.support.runs import ROOT

ROOTS: tuple[type[BaseModel], ...] = (
    RunConfig,
    SftConfig,
    ServeFile,
    JudgeSettings,
    PolicyEndpointSettings,
)


def paths() -> set[str]:
    found = set[str]()
    for root in ROOTS:
        for path, model in walk(root):
            found |= {dotted((*path, key)) for key in keys(model)} | {dotted(path)}
    return found - {""}


PATHS = paths()
SECTIONS = {part for path in PATHS if "." in path for part in path.split(".")[:-1]} - {"*"}
FOREIGN = {
    "logprobs.content",
    "policy.engine.lora.targets",
    "policy.engine.lora.vision",
    "policy.engine.freeze_vision",
    "data.shuffle",
    "data.max_train_samples",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers",
    "console.css",
    "console.js",
}
"""A field of OpenAI's answers, keys of older checkpoints, a key of verl, names of weights and of
files.
"""
ENDINGS = {
    "py",
    "md",
    "yaml",
    "json",
    "jsonl",
    "png",
    "safetensors",
    "parquet",
    "pt",
    "html",
    "txt",
    "key",
    "bin",
    "sh",
}


def exists(text: str) -> bool:
    """``text`` is a key, or the end of one; what follows ``with`` or a mapping is a component's or
    a person's own.
    """
    own = re.split(r"\.(?:with|flags|resources|extra|sizes|body)\.", text)[0]
    return any(path == own or path.endswith(f".{own}") for path in PATHS)


def mentioned(text: str) -> Iterator[str]:
    for match in re.finditer(r"(?<![\w./:-])([a-z_]+(?:\.[a-z_]+)+)(?![\w/(:*]|\.\w)", text):
        first, last = match[1].split(".")[0], match[1].rsplit(".", 1)[1]
        if first in SECTIONS and last not in ENDINGS and match[1] not in FOREIGN:
            yield match[1]


def texts() -> Iterator[tuple[str, str]]:
    """What a person reads: strings of the code (messages, docstrings) and the shipped files;
    test_docs.py has the pages.
    """
    for package in (
        "rayloop",
        "judge",
        "recipes",
        "actors",
        "cluster",
        "serve_apps",
        "benchmarks",
        "deploy",
    ):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
        for path in sorted((ROOT / package).rglob("*.yaml")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_every_key_that_a_message_names_exists() -> None:
    unknown = [
        f"{where}: {key}" for where, text in texts() for key in mentioned(text) if not exists(key)
    ]
    assert unknown == []


def test_names_are_distinguished_from_keys() -> None:
    """The test above can fail: a made-up key is one that does not exist, a module and a file are
    none.
    """
    assert list(
        mentioned("raise `environment.episode.max_prompt_tokens` or policy.optimizer.lr=1e-5")
    ) == [
        "environment.episode.max_prompt_tokens",
        "policy.optimizer.lr",
    ]
    assert not exists("environment.episode.max_prompt")
    assert exists("episode.max_prompt_tokens")
    assert exists("reward.source.with.judge.timeout")
    assert (
        list(mentioned("environment.py, policy.train(), rayloop.policy.x, docs/policy.loss")) == []
    )
