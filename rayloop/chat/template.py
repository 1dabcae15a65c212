"""The chat template of a model folder, rendered as transformers does, without transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from rayloop.chat.bounded import BoundedEnvironment
from rayloop.chat.tokenizer import read_json
from rayloop.core.failures import ConfigError

CLOCK = "strftime_now"
"""The function with which templates write the date."""
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class ChatTemplate:
    """A compiled chat template.

    ``source`` is Jinja. It sees ``special_tokens`` (bos_token, eos_token, ...) and ``variables`` by
    name. The variable ``strftime_now`` is the time, in ISO 8601, that the template's function of
    that name formats; the default is the present time. The time does not advance, so that all
    renderings have the same date. Raises jinja2.TemplateError.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        template_variables = dict(variables or {})
        time = template_variables.pop(CLOCK, None)
        moment = datetime.now() if time is None else datetime.fromisoformat(str(time))
        # The options of transformers: other blanks between blocks would be other tokens.
        environment = BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            filters={"tojson": _tojson},
        )
        environment.globals["raise_exception"] = _raise
        environment.globals[CLOCK] = moment.strftime
        self._environment = environment
        # Jinja computes constants while it compiles, so that is bounded too.
        environment.bounded()
        try:
            self._template = environment.from_string(source)
        except (RecursionError, ValueError, ArithmeticError) as error:
            # It is nested too deep, or has a constant that cannot be computed.
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error
        self._variables = {**special_tokens, **template_variables}

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render a conversation as text; ``generation`` appends the assistant's header.

        Raises jinja2.TemplateError for any failure.
        """
        self._environment.bounded()
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation,
                **self._variables,
            )
        except jinja2.TemplateError:
            raise
        except Exception as error:
            # The template's own code failed: it adds a text to a list, or reads a missing key.
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error


def load_chat_template(folder: Path, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """Load a template from chat_template.jinja, chat_template.json or tokenizer_config.json.

    Raises ConfigError when none of them has one.
    """
    source = template_source(folder)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    special_tokens = {}
    for name in _SPECIAL_TOKENS:
        token = tokenizer_config.get(name)
        if token is not None:
            special_tokens[name] = token["content"] if isinstance(token, dict) else str(token)
    try:
        return ChatTemplate(source, special_tokens, variables)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{folder}: the chat template does not compile: {error}") from error


def template_source(folder: Path) -> str:
    """The chat template as Jinja. Raises ConfigError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    in_tokenizer_config = read_json(folder / "tokenizer_config.json").get("chat_template")
    template = read_json(folder / "chat_template.json").get("chat_template", in_tokenizer_config)
    if isinstance(template, list):
        templates = {entry["name"]: entry["template"] for entry in template}
        template = templates.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"{folder} has no chat template (chat_template.jinja, chat_template.json, or"
            " chat_template in tokenizer_config.json). Use an instruction-tuned checkpoint, or"
            " add one"
        )
    return template


class _Generation(jinja2.ext.Extension):
    """The ``{% generation %}`` block of transformers, rendered as its body.

    transformers marks the assistant's text with it.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers; Jinja's own escapes the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
