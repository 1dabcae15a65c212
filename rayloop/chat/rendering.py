"""From chat messages to token ids and back, without transformers."""

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
KEPT = 1 << 18
"""Tokens of rendered texts that are kept, some 10 MB: members of a group show the same."""
_CLOSING = 4
"""Tokens with which a turn is closed, at most: the end of a call and that of the turn, for example.
"""
_LEADS = ("\n", ".")
"""Texts to put before an answer that is encoded, where the end of the assistant's header would
become one token with its start.
"""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Expanded token ids and the images that their image tokens stand for, in order."""

    token_ids: TokenIds
    images: tuple[PromptImage, ...] = ()


class Renderer:
    """Renders for one model folder, for many threads; equal texts and images are handled once.

    ``end_tokens`` end a turn, the template's own first; ``banned_tokens`` must not be sampled
    (vision tokens, ids without text); ``image_token`` is None for a text-only model. Raises
    ConfigError for a missing file or a template whose turns have no end.
    """

    def __init__(self, model: ModelSettings, max_image_pixels: int = MAX_PIXELS) -> None:
        folder = resolve(model.path, model.revision).folder
        self._template = load_chat_template(folder, model.chat_template_kwargs)
        self._encoder = Encoder(folder)
        self._tokenizer, self._special = self._encoder.tokenizer, self._encoder.special
        self._turns = Turns(self._template, self._encoder.markup, folder)

        config = read_json(folder / "config.json")
        self.image_token: int | None = (
            config.get("image_token_id") if "vision_config" in config else None
        )
        self._geometry = _geometry(folder, config, model) if self.image_token is not None else None
        around = (
            self._tokenizer.token_to_id(token)
            for token in family(config.get("model_type", "")).around
        )
        self._around = tuple(token for token in around if token is not None)

        self._images = None
        if self._geometry is not None:
            self._images = PromptImages(self._geometry, model.position_tint, max_image_pixels)
        self._encoded: Cache[str, TokenIds] = Cache(KEPT, len)

        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 0)
        unwritable = range(
            self._tokenizer.get_vocab_size(), size
        )  # ids that pad the embedding: they decode to nothing
        self.banned_tokens = tuple(sorted({*self._vision_tokens(config), *unwritable}))
        self.end_tokens = self._end_tokens(folder, config)
        self._warned = False

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Rendered:
        """The messages and the assistant's header.

        Image files stay files (``PromptImage.data`` is None) unless tinted. Raises DataFailure for
        an unusable image, and for messages or ``tools`` (OpenAI's schemas) that the template
        refuses.
        """
        images = [
            self._image(source, keep_file=True) for message in messages for source in message.images
        ]
        try:
            chat = [self._chat(message) for message in messages]
            text = self._template(
                chat, generation=True, tools=[self._plain_json(tool) for tool in tools]
            )
            if tools and not self._warned and text == self._template(chat, generation=True):
                self._warned = True
                logger.warning(
                    "the model's chat template shows no tools: the policy cannot know those that"
                    " the agent offers"
                )
        except jinja2.TemplateError as error:
            raise DataFailure("messages", f"the chat template refuses them: {error}") from error
        return Rendered(self._expanded(text, images), tuple(images))

    def observation(self, messages: Sequence[Message], sampled: TokenIds) -> Rendered:
        """The closing tokens that ``sampled`` lacks, the messages, the assistant's header.

        Images carry their bytes. Raises DataFailure for an unusable image, ConfigError when the
        template refuses messages or does not show their role.
        """
        images = [
            self._image(source, keep_file=False)
            for message in messages
            for source in message.images
        ]
        try:
            text = self._turns.following([self._chat(message) for message in messages])
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template refuses the observation: {error}") from error
        ids = self._expanded(text, images)
        return Rendered(ids[self._closed(sampled, ids) :], tuple(images))

    def _closed(self, sampled: TokenIds, ids: TokenIds) -> int:
        """How many of the closing tokens, with which ``ids`` begin, ``sampled`` ends with."""
        if not sampled:
            return 0
        end, closed = self._special[self._turns.end], self._special[self._turns.closed]
        # The policy sampled the end of a last turn (gpt-oss), in whose place an earlier turn has
        # another token: one of each.
        if end != closed and (sampled[-1], ids[0]) == (end, closed):
            return 1
        most = min(_CLOSING, len(sampled), len(ids))
        return next((n for n in range(most, 0, -1) if sampled[-n:] == ids[:n]), 0)

    def encode(self, text: str) -> TokenIds:
        """The tokens of a text as data, without end token; chat markup in it stays plain text."""
        return self._encoder.ids(self._encoder.disarmed(text))

    def answer(self, text: str, *, opening: bool = False) -> TokenIds:
        """The tokens of an assistant's turn as a conversation has them behind the header, end token
        included. ``opening``: with what the template writes before a last answer (Qwen3: an empty
        thought), unless the text brings such markup itself.
        """
        before = self._turns.opening if opening else ""
        if any(markup in text for markup in before.split()):
            before = ""
        said = f"{before}{self._encoder.disarmed(text)}{self._turns.end}"
        for lead in (self._turns.asked, *_LEADS):
            ids, head = self._encoder.ids(lead + said), self._encoder.ids(lead)
            if ids[: len(head)] == head:
                return ids[len(head) :]
        return self._encoder.ids(said)

    def decode(self, token_ids: TokenIds) -> str:
        """The text of ``token_ids``; special tokens are left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def shown(self, token_ids: TokenIds) -> str:
        """For people: the text with its special tokens."""
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
        """The message as the template wants it.

        Neighbouring texts are joined before markup in them is disarmed.
        """
        disarmed = self._encoder.disarmed
        parts: list[str | ImageSource] = []
        for part in message.parts:
            # A special token could be split over two texts, each of which looks harmless.
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        if all(isinstance(part, str) for part in parts):
            content: Any = disarmed("".join(map(str, parts)))
        else:
            content = [
                {"type": "text", "text": disarmed(p)} if isinstance(p, str) else {"type": "image"}
                for p in parts
            ]
        others = self._plain_json(message.fields)
        return self._turns.written({"role": disarmed(message.role), "content": content, **others})

    def _plain_json(self, value: Any) -> Any:
        """JSON data with chat markup in its texts disarmed."""
        if isinstance(value, str):
            return self._encoder.disarmed(value)
        if isinstance(value, Mapping):
            return {
                self._encoder.disarmed(str(key)): self._plain_json(part)
                for key, part in value.items()
            }
        return (
            [self._plain_json(part) for part in value] if isinstance(value, list | tuple) else value
        )

    def _image(self, source: ImageSource, *, keep_file: bool) -> PromptImage:
        if self._images is None:
            raise DataFailure(
                source.path or "image bytes",
                "the model takes text only, the messages have an image",
            )
        return self._images.of(source, keep_file=keep_file)

    def _expanded(self, text: str, images: Sequence[PromptImage]) -> TokenIds:
        """Token ids of rendered text; of the one image token that the template wrote per image, as
        many as the image has.
        """
        ids = self._encoded.made(text, lambda: self._encoder.ids(text))
        if self.image_token is None:
            return ids
        written = ids.count(self.image_token)
        if written != len(images):
            raise ConfigError(
                f"the chat template wrote {written} image tokens for {len(images)} images"
            )
        expanded: list[int] = []
        remaining = iter(images)
        for token in ids:
            if token == self.image_token:
                expanded += [
                    *self._around[:1],
                    *[token] * next(remaining).ref.tokens,
                    *self._around[1:],
                ]
            else:
                expanded.append(token)
        return tuple(expanded)

    def _end_tokens(self, folder: Path, config: dict[str, Any]) -> TokenIds:
        listed = read_json(folder / "generation_config.json").get(
            "eos_token_id", config.get("eos_token_id")
        )
        if not isinstance(listed, list):
            listed = [] if listed is None else [listed]
        return tuple(dict.fromkeys([self._special[self._turns.end], *listed]))

    def _vision_tokens(self, config: dict[str, Any]) -> set[int]:
        """Every vision token: those that the configuration names, and special tokens that are
        called so.
        """
        if self.image_token is None:
            return set()
        named = {
            i
            for key, i in config.items()
            if key.endswith("_token_id") and _VISION.search(key) and i is not None
        }
        return (
            named
            | {*self._around}
            | {i for text, i in self._special.items() if _VISION.search(text)}
        )


def _geometry(folder: Path, config: dict[str, Any], model: ModelSettings) -> ImageGeometry:
    try:
        return image_geometry(config, model.min_pixels, model.max_pixels)
    except KeyError as error:
        raise ConfigError(
            f"{folder}: config.json has no {error}, which says how the model cuts images"
        ) from error
