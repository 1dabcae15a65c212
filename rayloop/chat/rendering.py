"""Rendering of chat messages as token ids, and decoding, without transformers."""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rayloop.chat.template import load_chat_template
from rayloop.chat.tokenizer import Encoder, read_json, shown
from rayloop.chat.turns import Turns
from rayloop.config.model import ModelSettings
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.model_families import family
from rayloop.core.model_files import resolve
from rayloop.core.threads import Cache
from rayloop.core.types import ImageRef, ImageSource, Message, PromptImage, Sampling, TokenIds
from rayloop.data.images import MAX_PIXELS, ImageGeometry, PromptImages, image_geometry

logger = logging.getLogger(__name__)

_VISION = re.compile(r"vision|image|video")
CACHED_TOKENS = 1 << 18
"""Tokens of rendered texts in the cache, some 10 MB: members of a group render the same texts."""
_MOST_CLOSING_TOKENS = 4
"""The most tokens that close a turn: the end of a call and that of the turn, for example."""
_LEADS = ("\n", ".")
"""Texts to put before an answer that is encoded.

They are for an answer whose start would become one token with the end of the assistant's header.
"""


@dataclass(frozen=True)
class Rendered:
    """Expanded token ids, and the images of their image tokens in order."""

    token_ids: TokenIds
    images: tuple[PromptImage, ...] = ()

    @property
    def refs(self) -> tuple[ImageRef, ...]:
        """The images without their bytes."""
        return tuple(image.ref for image in self.images)


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """The number of tokens at the start that are equal."""
    for index, (token, other_token) in enumerate(zip(first, second, strict=False)):
        if token != other_token:
            return index
    return min(len(first), len(second))


class Renderer:
    """A renderer for one model folder, for many threads; equal texts and images are handled once.

    ``end_tokens`` end a turn, the template's own first; ``banned_tokens`` must not be sampled
    (vision tokens, ids without text); ``image_token`` is None for a text-only model. ``folder``:
    of the model, where its place is known. Raises ConfigError for a missing file or a template
    whose turns have no end.
    """

    def __init__(
        self,
        model: ModelSettings,
        max_image_pixels: int = MAX_PIXELS,
        folder: Path | None = None,
    ) -> None:
        folder = folder or resolve(model.path, model.revision).folder
        self._template = load_chat_template(folder, model.chat_template_kwargs)
        self._encoder = Encoder(folder)
        self._tokenizer = self._encoder.tokenizer
        self._special = self._encoder.special
        self._turns = Turns(self._template, self._encoder.markup, folder)

        config = read_json(folder / "config.json")
        self.image_token: int | None = None
        if "vision_config" in config:
            self.image_token = config.get("image_token_id")
        image_borders = family(config.get("model_type", "")).around
        border_ids = [self._tokenizer.token_to_id(token) for token in image_borders]
        self._image_borders = tuple(token for token in border_ids if token is not None)

        self._geometry = None
        self._images = None
        if self.image_token is not None:
            self._geometry = _geometry(folder, config, model)
            self._images = PromptImages(self._geometry, model.position_tint, max_image_pixels)
        self._encoded: Cache[str, TokenIds] = Cache(CACHED_TOKENS, len)

        embeddings = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 0)
        # These ids pad the embedding and decode to nothing.
        padding = range(self._tokenizer.get_vocab_size(), embeddings)
        self.banned_tokens = tuple(sorted({*self._vision_tokens(config), *padding}))
        self.end_tokens = self._end_tokens(folder, config)
        self._warned_about_tools = False

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Rendered:
        """Render the messages and the assistant's header.

        Image files stay files (``PromptImage.data`` is None) unless tinted. Raises DataFailure for
        an unusable image, and for messages or ``tools`` (OpenAI's schemas) that the template
        refuses.
        """
        images = self._prompt_images(messages, keep_files=True)
        try:
            chat = [self._chat(message) for message in messages]
            schemas = [self._disarmed_json(tool) for tool in tools]
            text = self._template(chat, generation=True, tools=schemas)
            if tools and not self._warned_about_tools:
                self._warn_if_tools_are_missing(text, chat)
        except jinja2.TemplateError as error:
            raise DataFailure("messages", f"the chat template refuses them: {error}") from error
        return Rendered(self._expanded_ids(text, images), tuple(images))

    def _warn_if_tools_are_missing(self, text: str, chat: Sequence[Mapping[str, Any]]) -> None:
        if text == self._template(chat, generation=True):
            self._warned_about_tools = True
            logger.warning(
                "the model's chat template shows no tools: the policy cannot know the tools that"
                " the agent offers"
            )

    def observation(self, messages: Sequence[Message], sampled: TokenIds) -> Rendered:
        """Render the closing tokens that ``sampled`` lacks, the messages, the assistant's header.

        Images carry their bytes. Raises DataFailure for an unusable image, ConfigError when the
        template refuses messages or does not show their role.
        """
        images = self._prompt_images(messages, keep_files=False)
        try:
            text = self._turns.following([self._chat(message) for message in messages])
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template refuses the observation: {error}") from error
        ids = self._expanded_ids(text, images)
        return Rendered(ids[self._sampled_closing(sampled, ids) :], tuple(images))

    def _sampled_closing(self, sampled: TokenIds, ids: TokenIds) -> int:
        """How many of the closing tokens at the start of ``ids`` are at the end of ``sampled``."""
        if not sampled:
            return 0
        end = self._special[self._turns.end]
        closed = self._special[self._turns.closed]
        # The policy sampled the end of a last turn (gpt-oss); an earlier turn has another token in
        # its place: one of each.
        if end != closed and (sampled[-1], ids[0]) == (end, closed):
            return 1
        for count in range(min(_MOST_CLOSING_TOKENS, len(sampled), len(ids)), 0, -1):
            if sampled[-count:] == ids[:count]:
                return count
        return 0

    def encode(self, text: str) -> TokenIds:
        """The tokens of a text as data, without an end token; chat markup in it stays text."""
        return self._encoder.ids(self._encoder.disarmed(text))

    def answer(self, text: str, *, opening: bool = False) -> TokenIds:
        """The tokens of an assistant's turn after the header, end token included.

        ``opening``: with the text that the template writes before a last answer (Qwen3: an empty
        thought), unless ``text`` has such markup itself.
        """
        prefix = self._turns.opening if opening else ""
        if any(markup in text for markup in prefix.split()):
            prefix = ""
        turn = f"{prefix}{self._encoder.disarmed(text)}{self._turns.end}"
        for lead in (self._turns.asked, *_LEADS):
            ids = self._encoder.ids(lead + turn)
            lead_ids = self._encoder.ids(lead)
            if ids[: len(lead_ids)] == lead_ids:
                return ids[len(lead_ids) :]
        return self._encoder.ids(turn)

    def decode(self, token_ids: TokenIds) -> str:
        """The text of ``token_ids``; special tokens are left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def shown(self, token_ids: TokenIds) -> str:
        """The text with its special tokens, in a readable form."""
        return shown(self._tokenizer, token_ids)

    def resized(self, image: ImageRef) -> tuple[int, int]:
        """Width and height in pixels after the processor's resize.

        Raises ConfigError for a text-only model.
        """
        if self._geometry is None:
            raise ConfigError("the model takes text only")
        _, rows, columns = image.grid
        return columns * self._geometry.patch, rows * self._geometry.patch

    def sampling(self, base: Sampling) -> Sampling:
        """``base`` with this model's end tokens (unless it names some) and banned tokens."""
        banned = tuple(sorted({*base.banned_tokens, *self.banned_tokens}))
        return dataclasses.replace(
            base, end_tokens=base.end_tokens or self.end_tokens, banned_tokens=banned
        )

    def _chat(self, message: Message) -> dict[str, Any]:
        """The message in the template's form.

        Neighbouring texts are joined before markup in them is disarmed.
        """
        parts: list[str | ImageSource] = []
        for part in message.parts:
            # A special token could be split over two texts, each of which looks harmless.
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        if all(isinstance(part, str) for part in parts):
            content: Any = self._encoder.disarmed("".join(map(str, parts)))
        else:
            content = [self._content_part(part) for part in parts]
        role = self._encoder.disarmed(message.role)
        fields = self._disarmed_json(message.fields)
        return self._turns.written({"role": role, "content": content, **fields})

    def _content_part(self, part: str | ImageSource) -> dict[str, str]:
        if isinstance(part, str):
            return {"type": "text", "text": self._encoder.disarmed(part)}
        return {"type": "image"}

    def _disarmed_json(self, value: Any) -> Any:
        """JSON data with chat markup in its texts disarmed."""
        if isinstance(value, str):
            return self._encoder.disarmed(value)
        if isinstance(value, Mapping):
            return {
                self._encoder.disarmed(str(key)): self._disarmed_json(part)
                for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._disarmed_json(part) for part in value]
        return value

    def _prompt_images(self, messages: Sequence[Message], *, keep_files: bool) -> list[PromptImage]:
        sources = [source for message in messages for source in message.images]
        if not sources:
            return []
        if self._images is None:
            raise DataFailure(
                sources[0].path or "image bytes",
                "the model takes text only, the messages have an image",
            )
        return [self._images.of(source, keep_file=keep_files) for source in sources]

    def _expanded_ids(self, text: str, images: Sequence[PromptImage]) -> TokenIds:
        """The token ids of a rendered text, with as many image tokens as each image has.

        The template writes only one image token per image.
        """
        ids = self._encoded.made(text, lambda: self._encoder.ids(text))
        if self.image_token is None:
            return ids
        count = ids.count(self.image_token)
        if count != len(images):
            raise ConfigError(
                f"the chat template wrote {count} image tokens for {len(images)} images"
            )
        expanded: list[int] = []
        remaining = iter(images)
        for token in ids:
            if token == self.image_token:
                image = next(remaining)
                expanded += self._image_borders[:1]
                expanded += [token] * image.ref.tokens
                expanded += self._image_borders[1:]
            else:
                expanded.append(token)
        return tuple(expanded)

    def _end_tokens(self, folder: Path, config: dict[str, Any]) -> TokenIds:
        generation = read_json(folder / "generation_config.json")
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        if not isinstance(eos, list):
            eos = [] if eos is None else [eos]
        return tuple(dict.fromkeys([self._special[self._turns.end], *eos]))

    def _vision_tokens(self, config: dict[str, Any]) -> set[int]:
        """All vision tokens: the configuration's, and special tokens with such a name."""
        if self.image_token is None:
            return set()
        tokens = set(self._image_borders)
        for key, token in config.items():
            if key.endswith("_token_id") and _VISION.search(key) and token is not None:
                tokens.add(token)
        for text, token in self._special.items():
            if _VISION.search(text):
                tokens.add(token)
        return tokens


def _geometry(folder: Path, config: dict[str, Any], model: ModelSettings) -> ImageGeometry:
    try:
        return image_geometry(config, model.min_pixels, model.max_pixels)
    except KeyError as error:
        raise ConfigError(
            f"{folder}: config.json has no {error}, which defines how the model cuts images"
        ) from error
