"""The tokenizer and chat template of a model folder, without transformers, which imports torch."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from rayloop.core.failures import ConfigError
from rayloop.core.types import TokenIds


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. Raises ConfigError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; save it with a fast tokenizer")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def shown(tokenizer: Tokenizer, token_ids: TokenIds) -> str:
    """For people: the text with its special tokens; of a run of equal ones, as an image has, the first and how many there are."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    texts = []
    for alike, run in groupby(token_ids, key=lambda token: token if token in special else None):
        ids = list(run)
        many = alike is not None and len(ids) > 1
        text = tokenizer.decode(ids[:1] if many else ids, skip_special_tokens=False)
        texts.append(f"{text}×{len(ids)}" if many else text)
    return "".join(texts)


class ChatTemplate:
    """``source`` is Jinja; ``special_tokens`` (bos_token, eos_token, ...) are visible to it by name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals.update(raise_exception=_raise, strftime_now=lambda format: datetime.now().strftime(format))
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, generation: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The conversation's text; ``generation`` appends the assistant's header. Raises jinja2.TemplateError."""
        return self._template.render(
            messages=messages, tools=list(tools) or None, documents=None, add_generation_prompt=generation, **self._special_tokens
        )


def load_chat_template(folder: Path) -> ChatTemplate:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json. Raises ConfigError when none has one."""
    tokenizer = read_json(folder / "tokenizer_config.json")
    source = _source(folder, tokenizer)
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = tokenizer.get(name)
        if token is not None:
            special[name] = token["content"] if isinstance(token, dict) else str(token)
    try:
        return ChatTemplate(source, special)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{folder}: the chat template does not compile: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; empty when there is no such file. Raises ConfigError when malformed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _source(folder: Path, tokenizer: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(folder / "chat_template.json").get("chat_template", tokenizer.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"{folder} has no chat template (chat_template.jinja, chat_template.json, or chat_template in "
            "tokenizer_config.json). Use an instruction-tuned checkpoint, or add one"
        )
    return template


class _Generation(jinja2.ext.Extension):
    """transformers' ``{% generation %}`` block, which marks assistant text: rendered as its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
