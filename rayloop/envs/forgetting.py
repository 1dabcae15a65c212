"""A context that begins anew without its oldest images, for episodes that show more of them than a model takes.

Sampled turns are never altered, and the trainer sees what the engine saw: the turns before are repeated as context,
token for token, and only observations whose images are forgotten are rendered again, with words in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rayloop.chat.rendering import Rendered, Renderer
from rayloop.core.types import Message, TokenIds

FORGOTTEN = "(this image is no longer shown)"
"""Stands where an image was."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn of the policy, and the observation that followed."""

    sampled: TokenIds
    messages: Sequence[Message]
    rendered: Rendered


def begun_anew(
    renderer: Renderer, prompt: Rendered, exchanges: Sequence[Exchange], sampled: TokenIds, room: int
) -> Rendered | None:
    """The context up to the turn ``sampled``, when at most ``room`` images may be in it; None when the prompt's alone are more.

    The prompt keeps its images. Of the observations the newest keep theirs, as many as fill half of the room that is left: so this
    is done once in several turns, and engines find most of a context in their caches.
    """
    if len(prompt.images) > room:
        return None
    left = (room - len(prompt.images)) // 2
    kept = list[Rendered]()
    for exchange in reversed(exchanges):
        left -= len(exchange.rendered.images)
        kept.append(exchange.rendered if left >= 0 else _forgotten(renderer, exchange))
    tokens, images = list(prompt.token_ids), list(prompt.images)
    for exchange, rendered in zip(exchanges, reversed(kept), strict=True):
        tokens += [*exchange.sampled, *rendered.token_ids]
        images += rendered.images
    return Rendered((*tokens, *sampled), tuple(images))


def _forgotten(renderer: Renderer, exchange: Exchange) -> Rendered:
    messages = [
        dataclasses.replace(message, parts=tuple(p if isinstance(p, str) else FORGOTTEN for p in message.parts))
        for message in exchange.messages
    ]
    return renderer.observation(messages, exchange.sampled) if exchange.rendered.images else exchange.rendered
