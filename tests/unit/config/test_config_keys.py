"""The keys themselves: each is on the page, none is without a use, no text names one that does not
exist.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from rayloop.config.explain import keys, walk
from rayloop.config.yaml_source import dotted
from rayloop.run.config import RunConfig
from rayloop.serve_apps.settings import JudgeSettings, PolicyEndpointSettings, ServeFile
from rayloop.sft.stage import SftConfig
from tests.support.runs import ROOT
from tools.pages.config import leaf_keys

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


def schema_paths(
    node: dict[str, Any], definitions: dict[str, Any], path: str = ""
) -> Iterator[str]:
    """Path of each value below a node of a JSON schema; ``*`` stands for an element."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    alternatives = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    if alternatives:
        for alternative in alternatives:
            yield from schema_paths(alternative, definitions, path)
        return
    for key, part in node.get("properties", {}).items():
        yield from schema_paths(part, definitions, f"{path}.{key}".removeprefix("."))
    if "properties" in node or node.get("type") == "null":
        return
    elements = [node.get("items"), node.get("additionalProperties")]
    below = {
        place
        for element in elements
        if isinstance(element, dict)
        for place in schema_paths(element, definitions, f"{path}.*")
    }
    yield from below - {f"{path}.*"} or {path}


def page_paths(page: str) -> Iterator[str]:
    """Path of each row of the tables of docs/config.md, and of the ``kind`` in each heading."""
    for section in page.split("\n## ")[1:]:
        heading, _, rest = section.partition("\n")
        places, _, kind = heading.partition(" with `kind: ")
        sections = [f"{place}." for place in re.findall("`(.+?)`", places)] or [""]
        keys_of_section = re.findall(r"^\| `(\w+)` \|", rest, re.MULTILINE)
        for place in sections:
            yield from (f"{place}{key}" for key in keys_of_section)
            if kind:
                yield f"{place}kind"


def test_every_value_of_the_schema_has_a_row_on_the_page() -> None:
    schema = RunConfig.model_json_schema()
    paths_of_schema = set(schema_paths(schema, schema["$defs"]))
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert paths_of_schema - set(page_paths(page)) == set()
    assert set(leaf_keys(RunConfig)) == paths_of_schema


def yaml_paths(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Path of each key of a YAML document, without the places in lists."""
    if isinstance(node, dict):
        for key, part in node.items():
            yield (*path, str(key))
            yield from yaml_paths(part, (*path, str(key)))
    elif isinstance(node, list):
        for part in node:
            yield from yaml_paths(part, path)


def test_a_key_that_no_shipped_file_sets_says_who_needs_it() -> None:
    files = [file for top in ("recipes", "deploy") for file in (ROOT / top).rglob("*.yaml")]
    written = {
        path[first:]
        for file in files
        for document in yaml.load_all(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        for path in yaml_paths(document)
        for first in range(len(path))
    }
    unset = {
        key: texts
        for key, texts in leaf_keys(RunConfig).items()
        if tuple(part for part in key.split(".") if part != "*") not in written
    }
    reasons = {
        (key, " ".join(text.split()).partition("Why a key: ")[2])
        for key, texts in unset.items()
        for text in texts
    }
    assert len(files) > 90
    assert len(unset) > 50, "no key is unset: the files are not read as they are"
    assert {key for key, reason in reasons if len(reason.split()) < 8} == set()
