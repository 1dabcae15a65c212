"""The keys themselves: those that are gone are refused with what replaced them, and no text names one that does not exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from rayloop.config.explain import keys, walk
from rayloop.config.removed import removed_below, removed_from
from rayloop.config.settings import load
from rayloop.config.yaml_source import dotted
from rayloop.core.failures import ConfigError
from rayloop.run.config import RunConfig
from rayloop.serve_apps.judge.settings import JudgeSettings, ServeFile
from rayloop.serve_apps.policy.settings import PolicyEndpointSettings
from rayloop.sft.stage import SftConfig
from tests.support.runs import ROOT, set_key, settings

ROOTS: tuple[type[BaseModel], ...] = (RunConfig, SftConfig, ServeFile, JudgeSettings, PolicyEndpointSettings)
GONE = removed_below(walk(RunConfig))


def kind_with(key: str) -> str:
    """The kind that once had the key."""
    *path, name = key.split(".")
    found = [m for at, m in walk(RunConfig) if dotted(at) == ".".join(path) and name in removed_from(m)]
    return str(found[0].model_fields["kind"].default)


def run_with(folder: Path, key: str, value: Any) -> RunConfig:
    config = settings(folder, folder)
    if key.startswith("rollout.engine."):
        kind = kind_with(key)
        config["rollout"]["engine"] = {"kind": kind} | ({"base_url": "http://h/v1", "model": "m"} if kind == "openai_http" else {})
    if key.startswith("loggers."):
        config["loggers"] = [{"kind": "wandb", "project": "p", key.split(".")[-1]: value}]
    elif key.startswith("algorithm.filtering.filters."):
        config["algorithm"]["filtering"] = {"filters": [{"kind": kind_with(key), key.split(".")[-1]: value}]}
    else:
        set_key(config, key, value)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return load(path, [], RunConfig)


@pytest.mark.parametrize(("key", "value"), GONE.items(), ids=list(GONE))
def test_a_removed_key_is_refused_by_name_unless_it_says_what_holds_anyway(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"no key any more \(was .* by default\): .*Leave it out") as caught:
        run_with(tmp_path, key, 7.5)
    assert key.split(".")[-1] in str(caught.value)
    assert run_with(tmp_path, key, value).name == "run", "as an old run's config.yaml has it"


def test_no_removed_key_is_a_key_and_the_advice_names_keys_that_exist() -> None:
    for root in ROOTS:
        for path, model in walk(root):
            for key, gone in removed_from(model).items():
                assert key not in keys(model), f"{dotted((*path, key))} is removed and there"
                assert gone.instead[-1] not in ".!", "a clause, the sentence is built around it"


def paths() -> set[str]:
    found = set[str]()
    for root in ROOTS:
        for path, model in walk(root):
            found |= {dotted((*path, key)) for key in keys(model)} | {dotted(path)}
    return found - {""}


PATHS = paths()
SECTIONS = {part for path in PATHS if "." in path for part in path.split(".")[:-1]} - {"*"}
FOREIGN = {"logprobs.content"}
"""A field of OpenAI's answers."""
ENDINGS = {"py", "md", "yaml", "json", "jsonl", "png", "safetensors", "parquet", "pt", "html", "txt", "key", "bin", "sh"}


def exists(text: str) -> bool:
    """``text`` is a key, or the end of one; what follows ``with`` or a mapping is a component's or a person's own."""
    own = re.split(r"\.(?:with|flags|resources|extra|sizes|body)\.", text)[0]
    return any(path == own or path.endswith(f".{own}") for path in PATHS)


def mentioned(text: str) -> Iterator[str]:
    for match in re.finditer(r"(?<![\w./:-])([a-z_]+(?:\.[a-z_]+)+)(?![\w/(:*]|\.\w)", text):
        first, last = match[1].split(".")[0], match[1].rsplit(".", 1)[1]
        if first in SECTIONS and last not in ENDINGS and match[1] not in FOREIGN:
            yield match[1]


def texts() -> Iterator[tuple[str, str]]:
    """What a person reads: strings of the code (messages, docstrings) and the shipped files; test_docs.py has the pages."""
    for package in ("rayloop", "judge", "recipes", "actors", "cluster", "serve_apps", "benchmarks", "deploy"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
        for path in sorted((ROOT / package).rglob("*.yaml")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_every_key_that_a_message_names_exists() -> None:
    unknown = [f"{where}: {key}" for where, text in texts() for key in mentioned(text) if not exists(key)]
    assert unknown == []


def test_names_are_told_from_keys() -> None:
    """The test above can fail: a made-up key is one that does not exist, a module and a file are none."""
    assert list(mentioned("raise `environment.episode.max_prompt_tokens` or policy.optimizer.lr=1e-5")) == [
        "environment.episode.max_prompt_tokens",
        "policy.optimizer.lr",
    ]
    assert not exists("environment.episode.max_prompt")
    assert exists("episode.max_prompt_tokens")
    assert exists("reward.source.with.judge.timeout")
    assert list(mentioned("environment.py, policy.train(), rayloop.policy.x, docs/policy.loss")) == []
