"""``env list|play|check``: which environments there are, one episode of them played by a person, many started at once."""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rayloop.chat.rendering import Renderer
from rayloop.commands import env_check
from rayloop.commands.arguments import add_overrides
from rayloop.core.failures import ConfigError
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import (
    Completion,
    FinishReason,
    ImageSource,
    RolloutRequest,
    Sampling,
    Task,
    TokenIds,
    TokenPrompt,
    TrajectoryId,
    Version,
)
from rayloop.data.dataset import Dataset
from rayloop.data.images import decode, png, probe
from rayloop.envs.catalog import FAMILIES, family, playable
from rayloop.envs.episode import play
from rayloop.envs.instance import Environments, Instance
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings
from rayloop.run.config import RunConfig, read
from rayloop.view.pictures import Colours, blocks, colours
from rayloop.view.words import visible

PLAYED = Path("runs/play")
QUIT = ("quit", "exit")
DEFAULTS = EpisodeSettings()
Ask = Callable[[], str | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``env`` and their options."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="the environments to try by name")
    listed.add_argument("family", nargs="?", metavar="FAMILY", help="name all of one family")
    listed.set_defaults(run=_list)
    play = actions.add_parser("play", help="play an episode by hand, seeing what the policy sees")
    play.add_argument("name", metavar="NAME", help="family:task, such as miniwob:click-color, or the YAML file of a run")
    add_overrides(play, "with a run: values to change")
    play.add_argument("--seed", type=int, default=0, help="of the task; equal seeds give equal ones (default: 0)")
    play.add_argument("--row", type=int, default=1, help="with a run: row of data.train, counted from 1 (default: 1)")
    play.add_argument("--pictures", type=Path, metavar="DIR", help="write pictures there, also in a colour terminal")
    play.set_defaults(run=_play)
    checked = actions.add_parser("check", help="start the environments of a run on this machine, and reset each")
    env_check.add_arguments(checked)


def _list(arguments: argparse.Namespace) -> int:
    for word in [arguments.family] if arguments.family else FAMILIES:
        try:
            found = family(word)
        except ConfigError as error:
            if arguments.family:
                raise
            print(f"{word}: {error}")
            continue
        print(f"{word}: {found.about}")
        shown = found.names if arguments.family else found.names[:4]
        print("".join(f"  {word}:{name}\n" for name in shown), end="")
        if more := len(found.names) - len(shown):
            print(f"  and {more} more: python -m rayloop env list {word}")
    return 0


def _play(arguments: argparse.Namespace) -> int:
    turn: Callable[[str], str] = str
    example = ""
    config = None
    if Path(arguments.name).suffix in (".yaml", ".yml"):
        config = read(Path(arguments.name), arguments.overrides)
        kind, task = _of_run(config, arguments.row)
    elif arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]}: {arguments.name} is no YAML file of a run, which alone has keys to set")
    else:
        found, kind, task = playable(arguments.name, arguments.seed)
        example, turn = found.example, found.turn
    shown_in = None if arguments.pictures else colours(os.environ, sys.stdout.isatty())
    pictures = PictureView(arguments.pictures or PLAYED / task.id.replace("/", "-"), shown_in)
    echo = not sys.stdin.isatty()

    def ask() -> str | None:
        line = _keyboard(echo)
        return line if line is None or not line.strip() or line.strip() in QUIT else turn(line)

    asyncio.run(_led(config, kind, task, ask, pictures) if config and kind.leads else _episode(kind, task, ask, pictures, example))
    return 0


def _of_run(config: RunConfig, row: int) -> tuple[EnvironmentKind, Task]:
    """The environment and the task of a usable row of a run. Raises ConfigError."""
    kinds, default = config.environment.kinds, config.environment.episode.environment
    dataset = Dataset(config.data.train, config.data.reader.build(), False, lambda failure: None, kinds)
    if not 1 <= row <= len(dataset):
        raise ConfigError(f"--row {row}: {config.data.train} has {len(dataset)} usable rows")
    task = dataset[row - 1]
    return kinds.get(task.environment, default), task


def _keyboard(echo: bool) -> str | None:
    """The next line; None at the end of input. ``echo`` prints it too, for input that no terminal shows."""
    print("> ", end="", flush=True)
    line = sys.stdin.readline()
    if echo or not line:
        print(visible(line.rstrip("\n")), flush=True)
    return line.rstrip("\n") if line else None


class PictureView:
    """Shows a picture: as half blocks where the terminal has colours, else as a file in ``folder``."""

    def __init__(self, folder: Path, kind: Colours | None) -> None:
        self._folder, self._kind = folder, kind
        self._shown = 0

    def show(self, source: ImageSource) -> None:
        """Raises DataFailure for what is no picture."""
        data, width, height = probe(source)
        picture = decode(data)
        if self._kind is not None:
            room = shutil.get_terminal_size()
            columns = min(room.columns, max(40, 2 * (room.lines - 8) * width // height))
            print(blocks(picture, columns, self._kind))
            return
        self._shown += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self._shown:02d}.png"
        file.write_bytes(png(picture))
        print(f"picture of {width}x{height} pixels: {file}")


async def _episode(kind: EnvironmentKind, task: Task, ask: Ask, pictures: PictureView, example: str) -> None:
    """Play until the environment ends the episode, or ``ask`` gives None or ``quit``. Raises what the environment raises."""
    environments = Environments(kind, {})
    instance = environments.of(task)
    try:
        await instance.make(DEFAULTS.reset_timeout)
        _show(await instance.call("reset", task, timeout=DEFAULTS.reset_timeout), pictures)
        print(f"Type what the policy would, one turn a line{f', such as {example}' if example else ''}; quit ends it.")
        await _turns(instance, ask, pictures)
        result = await instance.call("evaluate", timeout=DEFAULTS.step_timeout)
        print("the environment gives no result" if result is None else f"result: {result:g}")
    finally:
        await instance.close(DEFAULTS.reset_timeout)
        environments.end()


async def _led(config: RunConfig, kind: EnvironmentKind, task: Task, ask: Ask, pictures: PictureView) -> None:
    """Let an agent play, whose chats a person answers until the agent ends, or ``ask`` gives None or ``quit``."""
    renderer, environments = Renderer(config.model), Environments(kind, {})
    known: TokenIds = ()
    images = 0

    async def typed(prompt: TokenPrompt, sampling: Sampling) -> Completion:
        nonlocal known, images
        goes_on = bool(known) and prompt.token_ids[: len(known)] == known
        print(visible(renderer.shown(prompt.token_ids[len(known) if goes_on else 0 :])))
        for image in prompt.images[images if goes_on else 0 :]:
            pictures.show(ImageSource(image.ref.path, image.data))
        text = await asyncio.to_thread(ask)
        if text is None or text.strip().lower() in QUIT:
            raise ConfigError("the episode was left")
        tokens = (*renderer.encode(text), renderer.end_tokens[0])
        known, images = (*prompt.token_ids, *tokens), len(prompt.images)
        return Completion(tokens, (0.0,) * len(tokens), FinishReason.END_TOKEN, Version(0, 0))

    request = RolloutRequest(task, TrajectoryId(0, 0), 0, 0, config.rollout.sampling.sampling())
    try:
        played = await play(request, environments.of(task), renderer, config.environment.episode, typed)
    finally:
        environments.end()
    print(f"the episode is over: {played.end_reason}")
    print("the agent gives no result" if played.env_result is None else f"result: {played.env_result:g}")


async def _turns(instance: Instance, ask: Ask, pictures: PictureView) -> None:
    while (text := ask()) is not None and text.strip().lower() not in QUIT:
        if not text.strip():
            continue
        step: StepResult = await instance.call("step", text, timeout=DEFAULTS.step_timeout)
        if step.error is not None:
            print(f"not carried out: {visible(step.error)}")
        if step.observation is not None:
            _show(step.observation, pictures)
        if step.done or step.observation is None:
            print("the episode is over")
            return


def _show(observation: Observation, pictures: PictureView) -> None:
    for message in observation.messages:
        for part in message.parts:
            if isinstance(part, str):
                print(f"{message.role}: {visible(part)}")
            else:
                pictures.show(part)
