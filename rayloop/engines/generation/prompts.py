"""Prompts for engines that expand images themselves: one image token per image instead of one per merged patch."""

from __future__ import annotations

import numpy as np
from PIL import Image

from rayloop.core.failures import DataFailure
from rayloop.core.types import PromptImage, TokenPrompt
from rayloop.data.images import decode
from rayloop.engines.models import read_image


def collapsed(prompt: TokenPrompt, image_token: int | None) -> list[int]:
    """The prompt's tokens with one image token per image; ``image_token`` None: the model is text-only.

    Raises DataFailure for a prompt without tokens, or whose image tokens are not as many as its images need.
    """
    if not prompt.token_ids:
        raise DataFailure("prompt", "it has no tokens")
    if image_token is None:
        if prompt.images:
            raise DataFailure("prompt", f"it has {len(prompt.images)} images, but the model is text-only")
        return list(prompt.token_ids)
    ids = np.array(prompt.token_ids)
    where = np.flatnonzero(ids == image_token)
    counts = [image.ref.tokens for image in prompt.images]
    if len(where) != sum(counts):
        raise DataFailure("prompt", f"{len(where)} image tokens, but its {len(counts)} images need {sum(counts)}")
    first = np.cumsum([0, *counts])[:-1]
    rest: list[int] = np.delete(ids, np.delete(where, first)).tolist()
    return rest


def picture(image: PromptImage, patch: int) -> Image.Image:
    """Returns the image in the size that the model sees, ``patch`` pixels for each patch of its grid, so that an engine does not
    resize it. Raises DataFailure, InfrastructureFailure. Takes 0.2 s for 8 megapixels."""
    size = (image.ref.grid[2] * patch, image.ref.grid[1] * patch)
    return decode(read_image(image.ref, image.data)).resize(size, Image.Resampling.BICUBIC)
