"""Scores played episodes with the trainer, and puts all log-probs of a turn together."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rayloop.chat.rendering import Renderer
from rayloop.config.model import Dtype
from rayloop.core.types import ImageRef
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.engines.training.scorer import FrozenScorer
from rayloop.measure.parity import Floats, LogprobSource, SampledTurn
from rayloop.parity.play import Episode


def scored(
    model: ModelSettings,
    dtype: Dtype,
    renderer: Renderer,
    episodes: Sequence[Episode],
    given: Mapping[LogprobSource, Sequence[Floats]],
) -> tuple[list[SampledTurn], str]:
    """Return the sampled turns with all log-probs, and the trainer's attention kernel.

    They are scored by the trainer's own path: packed rows, and the model as transformers computes
    it. ``given``: further log-probs of each episode's sampled tokens; an engine's take the place of
    the ones in its turns. Raises ConfigError for a model that does not load, ValueError for a token
    that cannot have been sampled.
    """
    scorer = FrozenScorer(model, FsdpSettings(dtype=dtype))
    trajectories = [episode.trajectory for episode in episodes]
    columns = {**given, LogprobSource.TRAINER: scorer.logprobs(trajectories)}
    if renderer.image_token is not None:
        columns[LogprobSource.WRONG_IMAGES] = scorer.logprobs(trajectories, swap_images=True)
    likeliest = scorer.likeliest(trajectories)
    turns: list[SampledTurn] = []
    for place, episode in enumerate(episodes):
        logprobs = {source: arrays[place] for source, arrays in columns.items()}
        turns += _turns(episode, logprobs, likeliest[place], renderer)
    return turns, scorer.attention


def _turns(
    episode: Episode,
    logprobs: Mapping[LogprobSource, Floats],
    likeliest: npt.NDArray[np.int64],
    renderer: Renderer,
) -> list[SampledTurn]:
    """The sampled turns of an episode, from ``logprobs`` and tokens of all of them."""
    result: list[SampledTurn] = []
    images: list[ImageRef] = []
    depth = 0
    start = 0
    for turn in episode.trajectory.turns:
        images += turn.images
        if turn.logprobs is not None:
            part = slice(start, start + len(turn.token_ids))
            start = part.stop
            engine = np.array(turn.logprobs, np.float32)
            others = {source: array[part] for source, array in logprobs.items()}
            result.append(
                SampledTurn(
                    axis=episode.axis,
                    name=episode.trajectory.task_id,
                    play=episode.play,
                    turn=len(result) + 1,
                    images=len(images),
                    depth=depth,
                    logprobs={LogprobSource.ENGINE: engine, **others},
                    picture=_described(images[-1], renderer) if images else "",
                    other_choices=int((likeliest[part] != turn.token_ids).sum()),
                )
            )
        depth += len(turn.token_ids)
    return result


def _described(image: ImageRef, renderer: Renderer) -> str:
    """An image's size in pixels, and to which the model's processor resizes it."""
    columns, rows = renderer.resized(image)
    size = f"{image.width}x{image.height} pixels"
    is_resized = image.grid[0] == 1 and (columns, rows) != (image.width, image.height)
    return f"{size}, resized to {columns}x{rows}" if is_resized else size
