"""The tokenizer of a model folder, without transformers, which imports torch."""

import json
import re
import uuid
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from rayloop.core.failures import ConfigError
from rayloop.core.files import utf8
from rayloop.core.types import TokenIds

NOTHING = 0xFDD0
"""The first of Unicode's 32 noncharacters in a row."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. Raises ConfigError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; save it with a fast tokenizer")
    tokenizer = Tokenizer.from_file(str(file))
    # The file may hold the truncation and padding of its last use.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Encoder:
    """Encodes as the folder's tokenizer does, whole texts at once: what stands at their start, and
    the white space that a special token takes with it, depend on what is around. ``disarmed`` texts
    are data: a guard, which only a normaliser takes out again, keeps special tokens that are typed
    in them plain text. Raises ConfigError for a tokenizer that finds them even so.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        # Of characters that stand for nothing: a tokenizer may have added tokens of any others,
        # such as "bar", and would find them across the end of a guard that ends with "ba".
        self._guard = "".join(chr(NOTHING + int(digit, 16)) for digit in uuid.uuid4().hex)
        self.special = {
            t.content: i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special
        }
        # A regular expression takes the first alternative that fits, and one token may begin
        # another.
        longest_first = sorted(self.special, key=len, reverse=True)
        self.markup = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._guarded = _without(load_tokenizer(folder), self._guard)
        self._guarded.encode_special_tokens = True  # for what a special token is as a text
        texts = {
            token: self._guarded.encode(token, add_special_tokens=False).ids
            for token in self.special
        }
        self._guarded.encode_special_tokens = False
        for token, text in texts.items():
            if self.ids(self.disarmed(token)) != tuple(text):
                raise ConfigError(
                    f"{folder}: the tokenizer reads {token!r} as a special token wherever it is"
                    " typed"
                )

    def disarmed(self, text: str) -> str:
        """Break special tokens typed inside a text with the guard."""
        return self.markup.sub(lambda found: self._guard.join([*found[0], ""]), text)

    def ids(self, text: str) -> TokenIds:
        """The tokens of a text with special tokens, and with parts that were ``disarmed``."""
        tokenizer = self._guarded if self._guard in text else self.tokenizer
        return tuple(tokenizer.encode(utf8(text), add_special_tokens=False).ids)


def _without(tokenizer: Tokenizer, guard: str) -> Tokenizer:
    """The tokenizer, which takes ``guard`` out of a text once it has looked for special tokens."""
    if any(
        token.special and token.normalized
        for token in tokenizer.get_added_tokens_decoder().values()
    ):
        plain = json.loads(tokenizer.to_str())
        for token in plain["added_tokens"]:
            token["normalized"] = (
                token["normalized"] and not token["special"]
            )  # else it is looked for again
        tokenizer = Tokenizer.from_str(json.dumps(plain))
    steps = [normalizers.Replace(guard, "")]
    if tokenizer.normalizer is not None:
        steps.append(tokenizer.normalizer)
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def shown(tokenizer: Tokenizer, token_ids: TokenIds) -> str:
    """For people: the text with its special tokens; of a run of equal ones, as an image has, the
    first and how many there are.
    """
    special = {
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    }
    texts = []
    for alike, run in groupby(token_ids, key=lambda token: token if token in special else None):
        ids = list(run)
        many = alike is not None and len(ids) > 1
        text = tokenizer.decode(ids[:1] if many else ids, skip_special_tokens=False)
        texts.append(f"{text}×{len(ids)}" if many else text)
    return "".join(texts)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; empty when there is no such file.

    Raises ConfigError when malformed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected an object")
    return content
