"""From chat messages to token ids and back, without transformers."""

import dataclasses
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rayloop.chat.tokenizer import load_chat_template, load_tokenizer, read_json, shown
from rayloop.config.model import ModelSettings
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.files import utf8
from rayloop.core.model_families import family
from rayloop.core.model_files import resolve
from rayloop.core.threads import Cache
from rayloop.core.types import ImageRef, ImageSource, Message, PromptImage, Sampling, TokenIds
from rayloop.data.images import MAX_PIXELS, ImageGeometry, PromptImages, image_geometry

logger = logging.getLogger(__name__)

_VISION = re.compile(r"vision|image|video")
KEPT = 1 << 18
"""Tokens of rendered texts that are kept, some 10 MB: members of a group show the same."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Expanded token ids and the images that their image tokens stand for, in order."""

    token_ids: TokenIds
    images: tuple[PromptImage, ...] = ()


class Renderer:
    """Renders for one model folder, for many threads; equal texts and images are handled once. ``end_tokens`` end a turn, the
    template's own first; ``banned_tokens`` must not be sampled (vision tokens, ids without text); ``image_token`` is None for a
    text-only model. Raises ConfigError for a missing file or a template that rewrites turns."""

    def __init__(self, model: ModelSettings, max_image_pixels: int = MAX_PIXELS) -> None:
        folder = resolve(model.path, model.revision).folder
        self._template = load_chat_template(folder)
        self._tokenizer = load_tokenizer(folder)
        self._plain = load_tokenizer(folder)
        self._plain.encode_special_tokens = True
        self._special = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._markup = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")
        self._guard = f"\ufdd0{uuid.uuid4().hex}"
        config = read_json(folder / "config.json")
        self.image_token: int | None = config.get("image_token_id") if "vision_config" in config else None
        self._geometry = _geometry(folder, config, model) if self.image_token is not None else None
        around = (self._tokenizer.token_to_id(token) for token in family(config.get("model_type", "")).around)
        self._around = tuple(token for token in around if token is not None)
        self._images = PromptImages(g, model.position_tint, max_image_pixels) if (g := self._geometry) else None
        self._encoded: Cache[str, TokenIds] = Cache(KEPT, len)
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 0)
        unwritable = range(self._tokenizer.get_vocab_size(), size)  # ids that pad the embedding: they decode to nothing
        self.banned_tokens = tuple(sorted({*self._vision_tokens(config), *unwritable}))
        self._history, self._closing, end = self._pieces(folder)
        self.end_tokens = self._end_tokens(folder, config, end)
        self._warned = False

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Rendered:
        """The messages and the assistant's header. Image files stay files (``PromptImage.data`` is None) unless tinted. Raises
        DataFailure for an unusable image, and for messages or ``tools`` (OpenAI's schemas) that the template refuses."""
        images = [self._image(source, keep_file=True) for message in messages for source in message.images]
        try:
            chat = [self._chat(message) for message in messages]
            text = self._template(chat, generation=True, tools=[self._plain_json(tool) for tool in tools])
            if tools and not self._warned and text == self._template(chat, generation=True):
                self._warned = True
                logger.warning("the model's chat template shows no tools: the policy cannot know those that the agent offers")
        except jinja2.TemplateError as error:
            raise DataFailure("messages", f"the chat template refuses them: {error}") from error
        return Rendered(self._expanded(text, images), tuple(images))

    def observation(self, messages: Sequence[Message], sampled: TokenIds) -> Rendered:
        """The closing tokens that ``sampled`` lacks, the messages, the assistant's header. Images carry their bytes. Raises
        DataFailure for an unusable image, ConfigError when the template refuses messages or rewrites earlier ones."""
        images = [self._image(source, keep_file=False) for message in messages for source in message.images]
        try:
            text = self._template([*_DUMMY, *map(self._chat, messages)], generation=True)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template refuses the observation: {error}") from error
        if not text.startswith(self._history):
            raise ConfigError("the chat template rewrites earlier turns when an observation follows: not supported")
        ids = self._expanded(self._closing + text[len(self._history) :], images)
        return Rendered(ids[1:] if sampled and sampled[-1] == ids[0] else ids, tuple(images))

    def encode(self, text: str) -> TokenIds:
        """The tokens of a text as data, without end token; chat markup in it stays plain text."""
        return tuple(self._plain.encode(utf8(text.replace(self._guard, "")), add_special_tokens=False).ids)

    def decode(self, token_ids: TokenIds) -> str:
        """The text of ``token_ids``; special tokens are left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def shown(self, token_ids: TokenIds) -> str:
        """For people: the text with its special tokens."""
        return shown(self._tokenizer, token_ids)

    def resized(self, image: ImageRef) -> tuple[int, int]:
        """Width and height in pixels after the processor's resize. Raises ConfigError for a text-only model."""
        if self._geometry is None:
            raise ConfigError("the model takes text only")
        _, rows, columns = image.grid
        return columns * self._geometry.patch, rows * self._geometry.patch

    def sampling(self, base: Sampling) -> Sampling:
        """``base`` with this model's end tokens (unless it names some) and banned tokens."""
        banned = tuple(sorted({*base.banned_tokens, *self.banned_tokens}))
        return dataclasses.replace(base, end_tokens=base.end_tokens or self.end_tokens, banned_tokens=banned)

    def _chat(self, message: Message) -> dict[str, Any]:
        """The message as the template wants it. Neighbouring texts are joined before markup in them is disarmed."""
        parts: list[str | ImageSource] = []
        for part in message.parts:
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        disarmed = [self._disarm(part) if isinstance(part, str) else part for part in parts]
        if all(isinstance(part, str) for part in disarmed):
            return {"role": self._disarm(message.role), "content": "".join(map(str, disarmed))}
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in disarmed]
        return {"role": self._disarm(message.role), "content": content}

    def _plain_json(self, value: Any) -> Any:
        """JSON data with chat markup in its texts disarmed."""
        if isinstance(value, str):
            return self._disarm(value)
        if isinstance(value, Mapping):
            return {self._disarm(str(key)): self._plain_json(part) for key, part in value.items()}
        return [self._plain_json(part) for part in value] if isinstance(value, list | tuple) else value

    def _disarm(self, text: str) -> str:
        """Break special tokens typed inside a text with the guard, which ``encode`` takes out again."""
        return self._markup.sub(lambda found: self._guard.join([*found[0], ""]), text)

    def _encode_template(self, text: str) -> list[int]:
        """Token ids of rendered text: special tokens of the template as such, what lies between them as plain text."""
        ids: list[int] = []
        position = 0
        for found in self._markup.finditer(text):
            ids += self.encode(text[position : found.start()])
            ids.append(self._special[found[0]])
            position = found.end()
        ids += self.encode(text[position:])
        return ids

    def _image(self, source: ImageSource, *, keep_file: bool) -> PromptImage:
        if self._images is None:
            raise DataFailure(source.path or "image bytes", "the model takes text only, the messages have an image")
        return self._images.of(source, keep_file=keep_file)

    def _expanded(self, text: str, images: Sequence[PromptImage]) -> TokenIds:
        """Token ids of rendered text; of the one image token that the template wrote per image, as many as the image has."""
        ids = self._encoded.made(text, lambda: tuple(self._encode_template(text)))
        if self.image_token is None:
            return ids
        if (written := ids.count(self.image_token)) != len(images):
            raise ConfigError(f"the chat template wrote {written} image tokens for {len(images)} images")
        expanded: list[int] = []
        remaining = iter(images)
        for token in ids:
            if token == self.image_token:
                expanded += [*self._around[:1], *[token] * next(remaining).ref.tokens, *self._around[1:]]
            else:
                expanded.append(token)
        return tuple(expanded)

    def _pieces(self, folder: Path) -> tuple[str, str, str]:
        """A dummy conversation as the template writes it, the part of it that closes the assistant's turn, and the text that begins
        with the token that ends it: this part, or the next turn where the template closes none (GLM)."""
        try:
            asked = self._template(_DUMMY[:1], generation=True)
            answered = self._template(_DUMMY, generation=False)
            continued = self._template([*_DUMMY, _DUMMY[0]], generation=True)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template fails on a plain conversation: {error}") from error
        answer = asked + _DUMMY[1]["content"]
        if not (answered.startswith(answer) and continued.startswith(answered)):
            raise ConfigError(
                f"{folder}: the chat template is not prefix-stable: it writes an answered question differently from "
                "the question with the assistant's header, so what was sampled could not be continued"
            )
        if self._encode_template(continued) != self._tokenizer.encode(continued, add_special_tokens=False).ids:
            raise ConfigError(f"{folder}: the tokenizer's special tokens change the text around them (lstrip, rstrip)")
        closing = answered[len(answer) :]
        end = closing or continued[len(answered) :]
        if self._markup.match(end) is None:
            raise ConfigError(f"{folder}: the chat template ends a turn with {end!r}, expected a special token")
        return answered, closing, end

    def _end_tokens(self, folder: Path, config: dict[str, Any], end: str) -> TokenIds:
        listed = read_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
        others = listed if isinstance(listed, list) else [] if listed is None else [listed]
        return tuple(dict.fromkeys([self._encode_template(end)[0], *others]))

    def _vision_tokens(self, config: dict[str, Any]) -> set[int]:
        """Every vision token: those that the configuration names, and special tokens that are called so."""
        if self.image_token is None:
            return set()
        named = {i for key, i in config.items() if key.endswith("_token_id") and _VISION.search(key) and i is not None}
        return named | {*self._around} | {i for text, i in self._special.items() if _VISION.search(text)}


_DUMMY: list[dict[str, Any]] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]


def _geometry(folder: Path, config: dict[str, Any], model: ModelSettings) -> ImageGeometry:
    try:
        return image_geometry(config, model.min_pixels, model.max_pixels)
    except KeyError as error:
        raise ConfigError(f"{folder}: config.json has no {error}, which says how the model cuts images") from error
