"""``env list|play|check``: which environments there are, one episode of them played by a person,
many started at once.
"""

import argparse
import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloop.chat.rendering import Renderer
from rayloop.commands import env_check
from rayloop.commands.arguments import add_overrides
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.threads import complete
from rayloop.core.types import (
    Completion,
    EndReason,
    FinishReason,
    ImageSource,
    RolloutRequest,
    Sampling,
    Task,
    TokenIds,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.data.dataset import Dataset
from rayloop.data.images import decode, png, probe
from rayloop.envs.catalog import FAMILIES, family, playable
from rayloop.envs.episode import play
from rayloop.envs.instance import Environments, Instance
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings
from rayloop.run.config import RunConfig, read
from rayloop.run.folder import RunFolder
from rayloop.view.pictures import Colours, blocks, colours
from rayloop.view.reader import members
from rayloop.view.words import visible

PLAYED = Path("runs/play")
QUIT = ("quit", "exit")
DEFAULTS = EpisodeSettings()
Ask = Callable[[], str | None]


class EpisodeLeft(InfrastructureFailure):
    """A person ended the episode. Its agent gets the answer that it gets when an engine fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``env`` and their options."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="the environments to try by name")
    listed.add_argument("family", nargs="?", metavar="FAMILY", help="name all of one family")
    listed.set_defaults(run=_list)
    play = actions.add_parser("play", help="play an episode by hand, seeing what the policy sees")
    play.add_argument(
        "name",
        metavar="NAME",
        help="family:task, such as miniwob:click-color, or the YAML file of a run, or its folder",
    )
    add_overrides(play, "with a run: values to change")
    play.add_argument(
        "--seed", type=int, default=0, help="of the task; equal seeds give equal ones (default: 0)"
    )
    again = (
        "with a run's folder as NAME: replay an episode on record up to this turn, then go on; or a"
        " turn's address in the console"
    )
    play.add_argument("--from", dest="origin", metavar="STEP/GROUP/SAMPLE:TURN", help=again)
    play.add_argument(
        "--row",
        type=int,
        default=1,
        help="with a run: row of data.train, counted from 1 (default: 1)",
    )
    play.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help="write pictures there, also in a colour terminal",
    )
    play.set_defaults(run=_play)
    env_check.add_arguments(
        actions.add_parser(
            "check", help="start the environments of a run on this machine, and reset each"
        )
    )


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
    file, record = Path(arguments.name), Recorded()
    if arguments.origin:
        file, record = (
            RunFolder.begun(file).config,
            Recorded.of(RunFolder.begun(file), arguments.origin),
        )
    if file.suffix in (".yaml", ".yml"):
        config = read(file, arguments.overrides)
        kind, task = _of_run(config, record.task or arguments.row)
    elif arguments.overrides:
        raise ConfigError(
            f"{arguments.overrides[0]}: {arguments.name} is no YAML file of a run, which alone has"
            " keys to set"
        )
    else:
        found, kind, task = playable(arguments.name, arguments.seed)
        example, turn = found.example, found.turn
    shown_in = None if arguments.pictures else colours(os.environ, sys.stdout.isatty())
    pictures = PictureView(arguments.pictures or PLAYED / task.id.replace("/", "-"), shown_in)
    echo = not sys.stdin.isatty()

    def ask() -> str | None:
        line = _keyboard(echo)
        return line if line is None or not line.strip() or line.strip() in QUIT else turn(line)

    if config and (record.task or kind.leads):
        complete(_led(config, kind, task, ask, pictures, record))
    else:
        ends = config is not None and config.environment.episode.on_error == "end"
        complete(_episode(kind, task, ask, pictures, example, ends))
    return 0


@dataclass(frozen=True)
class Recorded:
    """The ``task`` of a recorded episode, what the policy said before the turn that is played, and
    the states that it saw.
    """

    task: str = ""
    said: Sequence[str] = ()
    states: Sequence[str] = ()

    @classmethod
    def of(cls, folder: RunFolder, origin: str) -> "Recorded":
        """``origin`` ends with the numbers of step, group, sample and turn, the turn counted from
        1. Raises ConfigError.
        """
        numbers = [int(number) for number in re.findall(r"[0-9]+", origin)[-4:]]
        if len(numbers) < 4:
            raise ConfigError(f"--from {origin}: expected STEP/GROUP/SAMPLE:TURN, such as 12/3/0:2")
        step, group, sample, turn = numbers
        found = next(
            (one for one in members(folder, step).get(group, ()) if one["sample"] == sample), None
        )
        if found is None:
            raise ConfigError(
                f"--from {origin}: episode {sample} of group {group} of step {step} is not on"
                " record (keep_rollouts)"
            )
        said = [one["text"] for one in found["turns"] if one["sampled"]]
        if not 1 <= turn <= len(said):
            raise ConfigError(f"--from {origin}: this episode has the turns 1 to {len(said)}")
        return cls(found["task"], said[: turn - 1], found.get("states", ()))


def _of_run(config: RunConfig, row: int | str) -> tuple[EnvironmentKind, Task]:
    """The environment and the task of a usable row of a run, by its number or by the task's id.

    Raises ConfigError.
    """
    kinds, default = config.environment.kinds, config.environment.episode.environment
    dataset = Dataset(
        config.data.train,
        config.data.reader.build(),
        False,
        lambda failure: None,
        kinds,
        anywhere=config.data.anywhere,
    )
    if isinstance(row, str):
        if (
            task := next(
                (one for one in map(dataset.__getitem__, range(len(dataset))) if one.id == row),
                None,
            )
        ) is None:
            raise ConfigError(f"--from: {config.data.train} has no usable row of the task {row}")
        return kinds.get(task.environment, default), task
    if not 1 <= row <= len(dataset):
        raise ConfigError(
            f"--row {row}: {config.data.train} has the usable rows 1 to {len(dataset)}"
        )
    task = dataset[row - 1]
    return kinds.get(task.environment, default), task


FENCE = '"""'
"""A line of this begins a turn of several lines, and another one ends it."""


def _keyboard(echo: bool) -> str | None:
    """The next turn, a line or the lines between two of ``FENCE``; None at the end of input.

    ``echo`` prints it too, for input that no terminal shows.
    """
    print("> ", end="", flush=True)
    line = _line(echo)
    if line is None or line.strip() != FENCE:
        return line
    lines = list[str]()
    while (line := _line(echo)) is not None and line.strip() != FENCE:
        lines.append(line)
    return "\n".join(lines)


def _line(echo: bool) -> str | None:
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


async def _episode(
    kind: EnvironmentKind, task: Task, ask: Ask, pictures: PictureView, example: str, ends: bool
) -> None:
    """Play until the environment ends the episode, ``ask`` gives None or ``quit``, or, with
    ``ends``, an action is not carried out. Raises what the environment raises.
    """
    environments = Environments(kind, {})
    instance = environments.of(task)
    try:
        await instance.make(DEFAULTS.step_timeout)
        _show(await instance.call("reset", task, timeout=DEFAULTS.step_timeout), pictures)
        such = f", such as {example}" if example else ""
        print(
            f"Type what the policy would, one turn a line{such}, or lines between {FENCE}; quit"
            " ends it."
        )
        await _turns(instance, ask, pictures, ends)
        result = await instance.call("evaluate", timeout=DEFAULTS.step_timeout)
        print("the environment gives no result" if result is None else f"result: {result:g}")
    finally:
        await instance.close(DEFAULTS.step_timeout)
        environments.end()


async def _led(
    config: RunConfig,
    kind: EnvironmentKind,
    task: Task,
    ask: Ask,
    pictures: PictureView,
    record: Recorded,
) -> None:
    """The episode of a run, whose turns are those of the ``record`` and then a person's, until
    ``ask`` gives None or ``quit``.
    """
    renderer, environments = Renderer(config.model), Environments(kind, {})
    known: TokenIds = ()
    images, said = 0, list(record.said)
    states = list(record.states[: len(said) + 1])

    async def typed(prompt: TokenPrompt, sampling: Sampling) -> Completion:
        nonlocal known, images
        goes_on = bool(known) and prompt.token_ids[: len(known)] == known
        fresh, shown = (
            prompt.token_ids[len(known) if goes_on else 0 :],
            prompt.images[images if goes_on else 0 :],
        )
        print(visible(renderer.shown(fresh)))
        for image in shown:
            pictures.show(ImageSource(image.ref.path, image.data))
        expected = states.pop(0) if states else ""
        if expected and (goes_on or not known):
            turns = (
                Turn("user", fresh, tuple(image.ref for image in shown)),
                Turn("assistant", (), logprobs=()),
            )
            here = Trajectory(TrajectoryId(0, 0), 0, task.id, 0, turns, sampling, EndReason.DONE)
            if here.states[0] != expected:
                states.clear()
                print(
                    f"turn {1 + len(record.said) - len(said)}: the environment shows something else"
                    " than on record"
                )
        replayed, text = bool(said), said.pop(0) if said else await asyncio.to_thread(ask)
        if text is None or (not replayed and text.strip().lower() in QUIT):
            raise EpisodeLeft("the episode was left")
        if replayed:
            print(f"on record> {visible(text)}")
        tokens = renderer.answer(text)
        known, images = (*prompt.token_ids, *tokens), len(prompt.images)
        return Completion(tokens, (0.0,) * len(tokens), FinishReason.END_TOKEN, Version(0, 0))

    request = RolloutRequest(task, TrajectoryId(0, 0), 0, 0, config.rollout.sampling.sampling())
    try:
        played = await play(
            request, environments.of(task), renderer, config.environment.episode, typed
        )
    except EpisodeLeft as left:
        print(left)
        return
    finally:
        environments.end()
    print(f"the episode is over: {played.end_reason}")
    print(
        "the agent gives no result"
        if played.env_result is None
        else f"result: {played.env_result:g}"
    )


async def _turns(instance: Instance, ask: Ask, pictures: PictureView, ends: bool) -> None:
    while (text := ask()) is not None and text.strip().lower() not in QUIT:
        if not text.strip():
            continue
        step: StepResult = await instance.call("step", text, timeout=DEFAULTS.step_timeout)
        if step.error is not None:
            print(f"not carried out: {visible(step.error)}")
        if step.observation is not None:
            _show(step.observation, pictures)
        if step.done or step.observation is None or (ends and step.error is not None):
            print("the episode is over")
            return


def _show(observation: Observation, pictures: PictureView) -> None:
    for message in observation.messages:
        for part in message.parts:
            if isinstance(part, str):
                print(f"{message.role}: {visible(part)}")
            else:
                pictures.show(part)
