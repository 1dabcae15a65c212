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

_FIRST_NONCHARACTER = 0xFDD0
"""The first of the 32 consecutive noncharacters of Unicode."""


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
    """An encoder with the folder's tokenizer, for a whole text at once.

    The tokens at the start of a text, and the white space that a special token absorbs, depend on
    the text around them. ``disarmed`` texts are data: special tokens that are typed in them stay
    plain text by a guard, which a normaliser removes again. Raises ConfigError for a tokenizer that
    finds these special tokens all the same.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        # The guard has noncharacters only: a tokenizer may have added tokens of any others,
        # such as "bar", and would find them across the end of a guard that ends with "ba".
        digits = [int(digit, 16) for digit in uuid.uuid4().hex]
        self._guard = "".join(chr(_FIRST_NONCHARACTER + digit) for digit in digits)
        added_tokens = self.tokenizer.get_added_tokens_decoder()
        self.special = {
            token.content: token_id for token_id, token in added_tokens.items() if token.special
        }
        # A regular expression takes the first alternative that fits, and one token may begin
        # another.
        longest_first = sorted(self.special, key=len, reverse=True)
        self.markup = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._guarded = _with_guard_removed(load_tokenizer(folder), self._guard)
        # With this option a special token is encoded as the text that it is.
        self._guarded.encode_special_tokens = True
        ids_as_text = {
            token: self._guarded.encode(token, add_special_tokens=False).ids
            for token in self.special
        }
        self._guarded.encode_special_tokens = False
        for token, ids in ids_as_text.items():
            if self.ids(self.disarmed(token)) != tuple(ids):
                raise ConfigError(
                    f"{folder}: the tokenizer reads {token!r} as a special token wherever it is"
                    " typed"
                )

    def disarmed(self, text: str) -> str:
        """The text with the guard after each character of a special token that is typed in it."""
        return self.markup.sub(lambda match: self._guard.join([*match[0], ""]), text)

    def ids(self, text: str) -> TokenIds:
        """The tokens of a text with special tokens, which may have ``disarmed`` parts."""
        tokenizer = self._guarded if self._guard in text else self.tokenizer
        return tuple(tokenizer.encode(utf8(text), add_special_tokens=False).ids)


def _with_guard_removed(tokenizer: Tokenizer, guard: str) -> Tokenizer:
    """A tokenizer that removes ``guard`` from a text after it has searched for special tokens."""
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    if any(token.special and token.normalized for token in added_tokens):
        settings = json.loads(tokenizer.to_str())
        for token in settings["added_tokens"]:
            # A normalized special token is searched for a second time, without the guard.
            if token["special"]:
                token["normalized"] = False
        tokenizer = Tokenizer.from_str(json.dumps(settings))
    steps = [normalizers.Replace(guard, "")]
    if tokenizer.normalizer is not None:
        steps.append(tokenizer.normalizer)
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def shown(tokenizer: Tokenizer, token_ids: TokenIds) -> str:
    """The text with its special tokens, in a readable form.

    A run of equal special tokens, as an image has, is shown as the first and their number.
    """
    added_tokens = tokenizer.get_added_tokens_decoder()
    special = {token for token, added in added_tokens.items() if added.special}
    texts = []
    for token, run in groupby(token_ids, key=lambda token: token if token in special else None):
        ids = list(run)
        if token is not None and len(ids) > 1:
            text = tokenizer.decode(ids[:1], skip_special_tokens=False)
            texts.append(f"{text}×{len(ids)}")
        else:
            texts.append(tokenizer.decode(ids, skip_special_tokens=False))
    return "".join(texts)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; empty when the file does not exist.

    Raises ConfigError for a malformed file.
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
