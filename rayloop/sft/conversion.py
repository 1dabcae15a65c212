"""Demonstrations in another action language: rows with answers, and episodes that a run recorded.

Each turn becomes a row, with what came before it as the prompt. A turn that the other language
cannot have is named, and with it those behind it, whose history it is.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayloop.core.failures import DataFailure
from rayloop.core.files import write_whole
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import decode, png, probe, read, untinted
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import encode
from rayloop.run.records.rollouts import NEW_CONTEXT, image_file
from rayloop.sft.answers import AnswerColumn, checked
from rayloop.sft.translation import Translation, Untranslatable

ASSISTANT = "assistant"
NO_MESSAGES = (
    "the record lacks messages of the environment: record it again, in an environment without"
    " an agent and with all screens in its history"
)


@dataclass(frozen=True)
class LeftOut:
    """Turns that are not written: the ``turn`` of a row or an episode, from 1, and those behind it.

    ``turns`` is their number; ``details`` quote what cannot be written.
    """

    where: str
    turn: int
    turns: int
    reason: str
    details: str


@dataclass
class Converter:
    """Makes rows of demonstrations, with their images below ``out``."""

    translation: Translation
    out: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def convert(self, tasks: Iterable[Task]) -> None:
        """Convert the answers of rows, or the messages that follow the prompts of ``episodes``."""
        (self.out / "images").mkdir(parents=True, exist_ok=True)
        for task in tasks:
            self._add(task)

    def leave_out(self, failure: DataFailure) -> None:
        """Note a row that cannot be read."""
        self.left_out.append(LeftOut(failure.path, 1, 1, failure.reason, str(failure)))

    def written(self) -> list[str]:
        """Write the files, and return what to say about them."""
        name = self.translation.target.language
        results = [f"{self.out}/train.jsonl: {len(self.rows)} turns in {name}"]
        missing: Counter[str] = Counter()
        for entry in self.left_out:
            missing[entry.reason] += entry.turns
        results += [f"left out, {count} turns: {reason}" for reason, count in missing.items()]
        entries = map(asdict, self.left_out)
        for file, rows in {"train": self.rows, "left_out": entries}.items():
            lines = "".join(encode(row) + "\n" for row in rows)
            write_whole(self.out / f"{file}.jsonl", lines.encode())
        return results

    def _add(self, task: Task) -> None:
        turns: list[Message] = []
        count = 0
        try:
            is_episode = isinstance(task.ground_truth, tuple)
            turns += task.ground_truth if is_episode else _answer(task)
            for prompt, answer in self._pairs(task, turns):
                count += 1
                row = {"id": f"{task.id}:{count}", "data_source": task.source}
                self.rows.append({**row, "prompt": prompt, "answer": answer})
        except (Untranslatable, DataFailure) as error:
            missing = sum(turn.role == ASSISTANT for turn in turns) - count
            reason = LeftOut(task.id, count + 1, max(1, missing), error.reason, str(error))
            self.left_out.append(reason)

    def _pairs(self, task: Task, turns: list[Message]) -> Iterator[tuple[list[Any], str]]:
        """Yield prompt and answer of each turn. Raises Untranslatable, DataFailure."""
        conversation: list[dict[str, Any]] = []
        prompt: Sequence[Message] = task.messages
        screen = next(iter(task.images), None)
        if screen is not None:
            prompt = self.translation.prompt(prompt, *_size(screen))
        for number, message in enumerate((*prompt, *turns)):
            content: Any = [self._part(part) for part in message.parts]
            if message.role == ASSISTANT:
                content = self._turn(message, screen)
                if number >= len(prompt):
                    yield list(conversation), content
            conversation.append({"role": message.role, "content": content})
            screen = next(reversed(message.images), screen)

    def _turn(self, message: Message, screen: ImageSource | None) -> str:
        if screen is None:
            raise Untranslatable("it has no screenshot before it, whose size its points need")
        text = "".join(part for part in message.parts if isinstance(part, str))
        return self.translation.turn(text, *_size(screen))

    def _part(self, part: str | ImageSource) -> dict[str, str]:
        """The part as rows have it. An image becomes a file."""
        if isinstance(part, str):
            return {"type": "text", "text": part}
        data = read(part)
        place = f"images/{image_file(hashlib.sha256(data).hexdigest(), data)}"
        write_whole(self.out / place, data, durable=False)
        return {"type": "image", "image": place}


def _size(image: ImageSource) -> tuple[int, int]:
    _, width, height = probe(image)
    return width, height


def _answer(task: Task) -> list[Message]:
    """The turn of a row. Raises DataFailure."""
    return list(checked(AnswerColumn().answer(task, random.Random(0)), task))


def episodes(folder: RunFolder, tint: float, least_reward: float | None) -> Iterator[Task]:
    """Yield a run's episodes on record with at least the reward: what followed is the truth.

    ``tint``: the model's ``position_tint``. Raises DataFailure for a record without messages.
    """
    for record in folder.rollouts:
        reward = record["reward"]
        is_enough = least_reward is None or (reward is not None and reward >= least_reward)
        # A replayed episode is on record at an earlier step, too.
        if not is_enough or record["replayed"]:
            continue
        name = "/".join(str(record[key]) for key in ("step", "group", "sample"))
        turns: list[Message] = []
        for turn in record["turns"]:
            answer = Message(ASSISTANT, (turn["text"],))
            turns += [answer] if turn["sampled"] else _messages(name, turn, folder, tint)
        prompt = _messages(name, record, folder, tint)
        yield Task(name, prompt, tuple(turns), record["source"])


def _messages(
    name: str, entry: Mapping[str, Any], folder: RunFolder, tint: float
) -> tuple[Message, ...]:
    """The messages of a prompt, or of what followed a turn. Raises DataFailure."""
    if entry.get("text") == NEW_CONTEXT:
        return ()
    said = entry.get("said", ())
    places = [text for _, texts in said for text in texts if text is None]
    if not said or len(places) != len(entry["images"]):
        raise DataFailure(name, NO_MESSAGES)
    images = iter([_image(image, folder, tint) for image in entry["images"]])
    return tuple(
        Message(role, tuple(next(images) if text is None else text for text in texts))
        for role, texts in said
    )


def _image(entry: Mapping[str, Any], folder: RunFolder, tint: float) -> ImageSource:
    """The image as the environment showed it."""
    if "file" not in entry:
        return ImageSource(entry["path"])
    file = ImageSource(str(folder.rollouts.path / entry["file"]))
    # The record has what the model saw, and the supervised stage tints again.
    return ImageSource(data=png(untinted(decode(read(file)), tint))) if tint else file
