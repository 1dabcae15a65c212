"""The context of an episode that has more images than a prompt may show.

Old images are replaced by words, so that new ones have room.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rayloop.chat.rendering import Rendered, Renderer
from rayloop.core.types import Message, TokenIds

FORGOTTEN = "(this image is no longer shown)"
"""Stands where an image was."""


@dataclass(frozen=True)
class Exchange:
    """A turn of the policy, and the observation that followed."""

    sampled: TokenIds
    messages: Sequence[Message]
    rendered: Rendered


def context_with_room(
    renderer: Renderer,
    prompt: Rendered,
    exchanges: Sequence[Exchange],
    sampled: TokenIds,
    max_images: int,
) -> Rendered | None:
    """Return the context up to the turn ``sampled`` with at most ``max_images`` images.

    None when the prompt alone has more.
    """
    if len(prompt.images) > max_images:
        return None

    # Half of the room stays free. With none left, the next image would need a new context again.
    images_left = (max_images - len(prompt.images)) // 2
    newest_first = list[Rendered]()
    for exchange in reversed(exchanges):
        images_left -= len(exchange.rendered.images)
        newest_first.append(
            exchange.rendered if images_left >= 0 else _without_images(renderer, exchange)
        )
    token_ids = list(prompt.token_ids)
    images = list(prompt.images)
    for exchange, rendered in zip(exchanges, reversed(newest_first), strict=True):
        token_ids += [*exchange.sampled, *rendered.token_ids]
        images += rendered.images
    return Rendered((*token_ids, *sampled), tuple(images))


def _without_images(renderer: Renderer, exchange: Exchange) -> Rendered:
    if not exchange.rendered.images:
        return exchange.rendered
    messages = [images_replaced(message, FORGOTTEN) for message in exchange.messages]
    return renderer.observation(messages, exchange.sampled)


def images_replaced(message: Message, words: str) -> Message:
    """Return the message with ``words`` in the place of each image."""
    parts = tuple(part if isinstance(part, str) else words for part in message.parts)
    return dataclasses.replace(message, parts=parts)
