"""The picture of a group: the members of one task act in their own copies of a live page
(docs/group.png).

    python -m benchmarks.evidence.group [--task ID] [--visit N] [--out FILE]

Plays one held-out task of recipes/arpo/quickstart.yaml with the shipped policy, in this process and
without Ray. A column is a member, a row is a turn. The screenshots are the browser's, before
``model.position_tint`` colours them for the tiny model.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from rayloop.actors.reward import RewardActor
from rayloop.actors.rollout import RolloutActor, start_weights
from rayloop.chat.rendering import Renderer
from rayloop.config.settings import load
from rayloop.core.groups import Scored
from rayloop.core.protocols import Observation
from rayloop.core.types import (
    Completion,
    RolloutRequest,
    Sampling,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
)
from rayloop.data.dataset import Dataset
from rayloop.envs.episode import run_episode
from rayloop.envs.grammar.actions import Actions, Click, Point
from rayloop.envs.grammar.scanner import read
from rayloop.envs.instance import Environments, Instance
from rayloop.rollout.scheduler import requests
from rayloop.run.config import RunConfig
from rayloop.transports.settings import ObjectStoreTransport

CONFIG = Path("recipes/arpo/quickstart.yaml")
INK, FAINT, RED, GREEN, LINE = "#1c2128", "#57606a", "#d1242f", "#1a7f37", "#d0d7de"
WIDTH, HEIGHT, GAP, HEAD, LABEL = 160, 210, 16, 34, 26
FONTS = (("-Bold", 17), ("", 15))
TITLE = (
    "One task, eight members of a group. A column is an episode, a row a turn, a red circle a"
    " click."
)
COORDINATE_RANGE = 1000
"""The policy writes points in thousandths of the screen."""


class Filmed:
    """An environment that keeps what it showed (``screens``), where the policy clicked (``clicks``)
    and its reward.
    """

    def __init__(self, inner: Instance) -> None:
        self._inner, self.name, self.contained = inner, inner.name, inner.contained
        self.screens: list[Image.Image] = []
        self.clicks: list[tuple[float, float] | None] = []
        self.reward = 0.0

    async def make(self, timeout: float) -> None:
        """As ``Instance.make``."""
        await self._inner.make(timeout)

    async def close(self, timeout: float) -> None:
        """As ``Instance.close``."""
        await self._inner.close(timeout)

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """As ``Instance.call``, with a record."""
        answer = await self._inner.call(method, *args, timeout=timeout)
        if method == "reset":
            self._keep(answer)
        elif method == "step":
            turn = read(args[0])
            first = turn.actions[0] if isinstance(turn, Actions) else None
            place = first.at if isinstance(first, Click) else None
            self.clicks.append(
                (place.x / COORDINATE_RANGE, place.y / COORDINATE_RANGE)
                if isinstance(place, Point)
                else None
            )
            self._keep(answer.observation)
        return answer

    def _keep(self, seen: Observation | None) -> None:
        images = (
            [image.data for message in seen.messages for image in message.images if image.data]
            if seen
            else []
        )
        self.screens += [
            Image.open(io.BytesIO(data)).convert("RGB").resize((WIDTH, HEIGHT)) for data in images
        ]


async def rollout(config: RunConfig, task_id: str, visit: int) -> tuple[str, list[Filmed]]:
    """Play the task ``group_size`` times at once; returns its instruction and a film of each
    member.
    """
    assert config.data.eval
    rows = Dataset(
        config.data.eval, config.data.reader.build(), False, print, config.environment.kinds
    )
    task = next(task for task in rows if task.id == task_id)
    episode, renderer = config.environment.episode, Renderer(config.model)
    environments = Environments(episode.environment, config.environment.kinds)
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        actor = RolloutActor(config.model, config.engine, ObjectStoreTransport(), folder)
        start = await asyncio.to_thread(start_weights, config.model, config.engine.dtype)
        await actor.load(start.manifest, start.source)

        async def generate(prompt: TokenPrompt, sampling: Sampling) -> Completion:
            said.append(renderer.shown(prompt.token_ids))
            return await actor.engine.generate(prompt, sampling)

        async def member(request: RolloutRequest, film: Filmed) -> Trajectory:
            return await run_episode(request, film, renderer, episode, generate)

        ids = [TrajectoryId(1, sample) for sample in range(config.algorithm.group_size)]
        asked = requests(config, task, ids, visit)
        films = [Filmed(environments.of(task)) for _ in asked]
        played = await asyncio.gather(*map(member, asked, films))
        outcomes = await RewardActor(config.model, config.reward).score(task, 0, *played)
    for film, outcome in zip(films, outcomes, strict=True):
        film.reward = outcome.value if isinstance(outcome, Scored) else 0.0
    return said[0], films


def draw(films: Sequence[Filmed], title: str) -> Image.Image:
    """A column per member, a row per turn, below it reward and advantage."""
    rows = max(len(film.clicks) for film in films)
    sheet = Image.new(
        "RGB",
        (GAP + len(films) * (WIDTH + GAP), HEAD + rows * (HEIGHT + GAP) + 2 * LABEL + 6),
        "white",
    )
    pen, text, small = (
        ImageDraw.Draw(sheet),
        *(ImageFont.truetype(f"DejaVuSans{name}.ttf", size) for name, size in FONTS),
    )
    pen.text((GAP, 8), title, INK, text)
    rewards = [film.reward for film in films]
    spread = stdev(rewards) + 1e-6
    for column, film in enumerate(films):
        left = GAP + column * (WIDTH + GAP)
        for row, click in enumerate(film.clicks):
            top = HEAD + row * (HEIGHT + GAP)
            sheet.paste(film.screens[row], (left, top))
            pen.rectangle((left - 1, top - 1, left + WIDTH, top + HEIGHT), outline=LINE)
            if click:
                x, y = left + click[0] * WIDTH, top + click[1] * HEIGHT
                pen.ellipse((x - 9, y - 9, x + 9, y + 9), outline="white", width=5)
                pen.ellipse((x - 8, y - 8, x + 8, y + 8), outline=RED, width=3)
            else:
                pen.text((left + 8, top + HEIGHT - LABEL), "no valid action", RED, small)
        top = HEAD + rows * (HEIGHT + GAP)
        pen.text((left, top), f"reward {film.reward:g}", GREEN if film.reward > 0 else RED, text)
        pen.text(
            (left, top + LABEL),
            f"advantage {(film.reward - fmean(rewards)) / spread:+.2f}",
            FAINT,
            small,
        )
    return sheet


def main() -> None:
    """Play a group and write its picture."""
    parser = argparse.ArgumentParser(
        description="A picture of eight members of a group in a live page."
    )
    parser.add_argument("--task", default="val-click-tab-2", help="id of a held-out task")
    parser.add_argument("--visit", type=int, default=1, help="another number samples anew")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/group.png"), help="the file to write"
    )
    chosen = parser.parse_args()
    prompt, films = asyncio.run(rollout(load(CONFIG, [], RunConfig), chosen.task, chosen.visit))
    print(prompt, [(film.reward, film.clicks, len(film.screens)) for film in films], sep="\n")
    draw(films, TITLE).save(chosen.out, optimize=True)


if __name__ == "__main__":
    main()
