"""``env list|play|check``: names environments, plays an episode by hand, starts many at once."""

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
from rayloop.config.settings import check_components
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
from rayloop.data.images import decode, png, probe
from rayloop.envs.catalog import FAMILIES, family, named_environment
from rayloop.envs.episode import run_episode
from rayloop.envs.grammar.actions import Actions, Click, Point
from rayloop.envs.grammar.language import spoken_format
from rayloop.envs.grammar.rules import Extent
from rayloop.envs.instance import Environments, Instance
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings
from rayloop.run.config import RunConfig, read
from rayloop.run.folder import RunFolder
from rayloop.run.preflight import prepare
from rayloop.view.formatting import visible
from rayloop.view.pictures import Colours, blocks, colours
from rayloop.view.reader import members

PLAYED = Path("runs/play")
QUIT = ("quit", "exit")
DEFAULTS = EpisodeSettings()
Ask = Callable[[], str | None]


class EpisodeLeft(InfrastructureFailure):
    """The user ended the episode; its agent gets the answer that it gets when an engine fails."""


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
    play.add_argument(
        "--from",
        dest="origin",
        metavar="STEP/GROUP/SAMPLE:TURN",
        help=(
            "with a run's folder as NAME: replay an episode on record up to this turn, then go on;"
            " or a turn's address in the console"
        ),
    )
    play.add_argument(
        "--language",
        metavar="NAME",
        help=(
            "with family:task: the language of the turns (docs/compatibility.md); a run has its"
            " model's"
        ),
    )
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
            environments = family(word)
        except ConfigError as error:
            if arguments.family:
                raise
            print(f"{word}: {error}")
            continue
        print(f"{word}: {environments.about}")
        names = environments.names if arguments.family else environments.names[:4]
        print("".join(f"  {word}:{name}\n" for name in names), end="")
        more = len(environments.names) - len(names)
        if more:
            print(f"  and {more} more: python -m rayloop env list {word}")
    return 0


def _play(arguments: argparse.Namespace) -> int:
    turn: Callable[[str], str] = str
    example = ""
    config = None
    file = Path(arguments.name)
    record = Recorded()
    if arguments.origin:
        folder = RunFolder.begun(file)
        file = folder.config
        record = Recorded.of(folder, arguments.origin)
    if file.suffix in (".yaml", ".yml"):
        config = prepare(read(file, arguments.overrides)).speaking().config
        kind, task = _of_run(config, record.task or arguments.row)
    elif arguments.overrides:
        raise ConfigError(
            f"{arguments.overrides[0]}: {arguments.name} is not the YAML file of a run, which alone"
            " has keys to set"
        )
    else:
        environments, kind, task = named_environment(arguments.name, arguments.seed)
        example = environments.example
        turn = environments.turn
        if arguments.language:
            options = {**kind.with_, "language": arguments.language}
            kind = kind.model_copy(update={"with_": options})
            check_components(EpisodeSettings(environment=kind))
            turn = str
    language = kind.with_.get("language")
    if isinstance(language, str):
        example = _click(language)
    terminal_colours = None if arguments.pictures else colours(os.environ, sys.stdout.isatty())
    picture_folder = arguments.pictures or PLAYED / task.id.replace("/", "-")
    pictures = PictureView(picture_folder, terminal_colours)
    echo = not sys.stdin.isatty()

    def ask() -> str | None:
        line = _keyboard(echo)
        return line if line is None or not line.strip() or line.strip() in QUIT else turn(line)

    if config and (record.task or kind.agent_driven):
        complete(_episode_of_run(config, kind, task, ask, pictures, record))
    else:
        ends = config is not None and config.environment.episode.on_error == "end"
        complete(_episode(kind, task, ask, pictures, example, ends))
    return 0


def _click(language: str) -> str:
    """A click near the corner of a screen, as the language writes it."""
    return spoken_format(language).write(Actions("", (Click(Point(1, 1)),)), Extent(1, 1))


@dataclass(frozen=True)
class Recorded:
    """A recorded episode up to the turn that is played."""

    task: str = ""
    said: Sequence[str] = ()
    """The policy's turns before it."""
    states: Sequence[str] = ()
    """The states that the policy saw."""

    @classmethod
    def of(cls, folder: RunFolder, origin: str) -> "Recorded":
        """The episode that ``origin`` names. Raises ConfigError.

        ``origin`` ends with the numbers of step, group, sample and turn, the turn counted from 1.
        """
        numbers = [int(number) for number in re.findall(r"[0-9]+", origin)[-4:]]
        if len(numbers) < 4:
            raise ConfigError(f"--from {origin}: expected STEP/GROUP/SAMPLE:TURN, such as 12/3/0:2")
        step, group, sample, turn = numbers
        records = members(folder, step).get(group, ())
        episode = next((record for record in records if record["sample"] == sample), None)
        if episode is None:
            raise ConfigError(
                f"--from {origin}: episode {sample} of group {group} of step {step} is not on"
                " record (keep_rollouts)"
            )
        texts = [one_turn["text"] for one_turn in episode["turns"] if one_turn["sampled"]]
        if not 1 <= turn <= len(texts):
            raise ConfigError(f"--from {origin}: this episode has the turns 1 to {len(texts)}")
        return cls(episode["task"], texts[: turn - 1], episode.get("states", ()))


def _of_run(config: RunConfig, row: int | str) -> tuple[EnvironmentKind, Task]:
    """The environment and the task of a usable row of a run, by its number or by the task's id.

    Raises ConfigError.
    """
    kinds = config.environment.kinds
    dataset = config.data.rows(config.data.train, lambda failure: None, kinds)
    if isinstance(row, str):
        matches = [task for task in dataset if task.id == row]
        if not matches:
            raise ConfigError(f"--from: {config.data.train} has no usable row of the task {row}")
        task = matches[0]
    elif 1 <= row <= len(dataset):
        task = dataset[row - 1]
    else:
        raise ConfigError(
            f"--row {row}: {config.data.train} has the usable rows 1 to {len(dataset)}"
        )
    return kinds.get(task.environment, config.environment.episode.environment), task


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
    lines: list[str] = []
    while True:
        line = _line(echo)
        if line is None or line.strip() == FENCE:
            return "\n".join(lines)
        lines.append(line)


def _line(echo: bool) -> str | None:
    line = sys.stdin.readline()
    if echo or not line:
        print(visible(line.rstrip("\n")), flush=True)
    return line.rstrip("\n") if line else None


class PictureView:
    """Shows pictures as half blocks where the terminal has colours, else as files in ``folder``."""

    def __init__(self, folder: Path, kind: Colours | None) -> None:
        self._folder = folder
        self._kind = kind
        self._count = 0

    def show(self, source: ImageSource) -> None:
        """Show one picture. Raises DataFailure for a file that is not one."""
        data, width, height = probe(source)
        picture = decode(data)
        if self._kind is not None:
            terminal = shutil.get_terminal_size()
            # Eight lines stay free for the text; a character is about twice as high as wide.
            columns_that_fit = 2 * (terminal.lines - 8) * width // height
            columns = min(terminal.columns, max(40, columns_that_fit))
            print(blocks(picture, columns, self._kind))
            return
        self._count += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self._count:02d}.png"
        file.write_bytes(png(picture))
        print(f"picture of {width}x{height} pixels: {file}")


async def _episode(
    kind: EnvironmentKind, task: Task, ask: Ask, pictures: PictureView, example: str, ends: bool
) -> None:
    """Play until the environment ends the episode, or ``ask`` gives None or ``quit``.

    With ``ends`` an action that is not carried out ends it too. Raises the environment's
    exceptions.
    """
    environments = Environments(kind, {})
    instance = environments.of(task)
    try:
        await instance.make(DEFAULTS.step_timeout)
        _show(await instance.call("reset", task, timeout=DEFAULTS.step_timeout), pictures)
        example_text = f", such as {example}" if example else ""
        print(
            f"Type what the policy would, one turn a line{example_text}, or lines between {FENCE};"
            " quit ends it."
        )
        await _turns(instance, ask, pictures, ends)
        result = await instance.call("evaluate", timeout=DEFAULTS.step_timeout)
        print("the environment gives no result" if result is None else f"result: {result:g}")
    finally:
        await instance.close(DEFAULTS.step_timeout)
        environments.end()


class _TypedTurns:
    """Answers an episode's prompts with the turns of a record, and then with the user's."""

    def __init__(
        self, task: Task, renderer: Renderer, ask: Ask, pictures: PictureView, record: Recorded
    ) -> None:
        self._task = task
        self._renderer = renderer
        self._ask = ask
        self._pictures = pictures
        self._record = record
        self._replay = list(record.said)
        self._expected_states = list(record.states[: len(record.said) + 1])
        self._shown_tokens: TokenIds = ()
        self._shown_images = 0

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Show the new part of the prompt, and return the next turn.

        Raises EpisodeLeft when ``ask`` gives None or ``quit``.
        """
        size = len(self._shown_tokens)
        continues = size > 0 and prompt.token_ids[:size] == self._shown_tokens
        tokens = prompt.token_ids[size:] if continues else prompt.token_ids
        images = prompt.images[self._shown_images :] if continues else prompt.images
        print(visible(self._renderer.shown(tokens)))
        for image in images:
            self._pictures.show(ImageSource(image.ref.path, image.data))
        expected = self._expected_states.pop(0) if self._expected_states else ""
        if expected and (continues or not size):
            turn = Turn("user", tokens, tuple(image.ref for image in images))
            self._compare(turn, sampling, expected)
        answer = self._renderer.answer(await self._next_text())
        self._shown_tokens = (*prompt.token_ids, *answer)
        self._shown_images = len(prompt.images)
        return Completion(answer, (0.0,) * len(answer), FinishReason.END_TOKEN, Version(0, 0))

    def _compare(self, turn: Turn, sampling: Sampling, expected: str) -> None:
        """Print a line when the environment shows another state than the recorded one."""
        turns = (turn, Turn("assistant", (), logprobs=()))
        trajectory = Trajectory(
            TrajectoryId(0, 0), 0, self._task.id, 0, turns, sampling, EndReason.DONE
        )
        if trajectory.states[0] != expected:
            # After a difference every further state may differ.
            self._expected_states.clear()
            number = 1 + len(self._record.said) - len(self._replay)
            print(f"turn {number}: the environment shows something else than on record")

    async def _next_text(self) -> str:
        if self._replay:
            text = self._replay.pop(0)
            print(f"on record> {visible(text)}")
            return text
        line = await asyncio.to_thread(self._ask)
        if line is None or line.strip().lower() in QUIT:
            raise EpisodeLeft("the episode was left")
        return line


async def _episode_of_run(
    config: RunConfig,
    kind: EnvironmentKind,
    task: Task,
    ask: Ask,
    pictures: PictureView,
    record: Recorded,
) -> None:
    """The episode of a run with the turns of the ``record``, and then the user's."""
    renderer = Renderer(config.model)
    environments = Environments(kind, {}, config.environment.history)
    turns = _TypedTurns(task, renderer, ask, pictures, record)
    request = RolloutRequest(task, TrajectoryId(0, 0), 0, 0, config.rollout.sampling.sampling())
    try:
        trajectory = await run_episode(
            request,
            environments.of(task),
            renderer,
            config.environment.episode,
            turns.generate,
            history=environments.history(task),
        )
    except EpisodeLeft as error:
        print(error)
        return
    finally:
        environments.end()
    print(f"the episode is over: {trajectory.end_reason}")
    result = trajectory.env_result
    print("the agent gives no result" if result is None else f"result: {result:g}")


async def _turns(instance: Instance, ask: Ask, pictures: PictureView, ends: bool) -> None:
    """Give the user's turns to the environment, until one of them ends the episode."""
    while True:
        text = ask()
        if text is None or text.strip().lower() in QUIT:
            return
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
