"""A published number: the protocol that it was measured by, and the scores of each task.

One JSON file, which ``eval --protocol`` writes and ``eval --like`` runs again.
"""

import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayloop.config.explain import short
from rayloop.config.yaml_source import flat
from rayloop.core.failures import ConfigError
from rayloop.core.files import content, write_whole
from rayloop.measure.controls import RIGHT, SAMPLED, Item, Pair, of_arm, pairs

SCHEMA = "rayloop-protocol/2"
FIRST_SCHEMA = "rayloop-protocol/1"
"""The schema of files in which the code is a part of the protocol, by the name CODE."""
CODE = "rayloop"
QUESTION_TIMEOUT_S = 30.0
"""Seconds in which a program says its version, or lists the fonts."""
MAX_FILE_BYTES = 32 << 20
ARMS = (RIGHT, SAMPLED)
"""The arms whose scores are a number: with the right image, greedy or sampled."""
UNKNOWN = "nothing"
"""The value of a part that one of two protocols lacks."""

Parts = Mapping[str, Any]
"""What decides a number, by name; plain data."""
Code = Mapping[str, str]
"""The code that measured: ``version``, ``commit`` and ``source``, which is a hash of its files."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class Measurement(_Strict):
    """How to measure again: the configuration, and what the command line named.

    Paths are as they were written, so relative ones lead to the same files in another clone.
    """

    config: dict[str, Any]
    checkpoint: str | None
    data: str
    samples: int
    retries: int
    benchmark: str


class ScoredAnswer(_Strict):
    """The scores of one answer, the ``sample``-th of its task and arm."""

    arm: str
    task: str
    sample: int
    reward: float
    components: dict[str, float]

    @property
    def item(self) -> Item:
        """The answer as an evaluation has it."""
        return Item(source="", **self.model_dump())


class MeasuredNumber(_Strict):
    """The weights, by their hash, and the scores of all answers.

    A file has the ``components`` by name, and the answers by arm and task: the reward and the
    components of each sample, null where an answer has none of that name. Files of the first schema
    have an object for each answer, which is five times as long.
    """

    weights: str
    answers: list[ScoredAnswer]

    @model_validator(mode="before")
    @classmethod
    def _from_table(cls, number: Any) -> Any:
        if not isinstance(number, dict) or not isinstance(number.get("answers"), dict):
            return number
        rest = dict(number)
        names = rest.pop("components")
        answers = []
        for arm, tasks in rest.pop("answers").items():
            for task, samples in tasks.items():
                for sample, row in enumerate(samples):
                    answers.append(_from_row(arm, task, sample, names, row))
        return {**rest, "answers": answers}

    def table(self) -> dict[str, Any]:
        """The number as a file has it."""
        names = sorted({name for answer in self.answers for name in answer.components})
        arms: dict[str, dict[str, list[list[float | None]]]] = {}
        for answer in self.answers:
            samples = arms.setdefault(answer.arm, {}).setdefault(answer.task, [])
            # A number is written when all answers have a score, so that none is missing between.
            assert len(samples) == answer.sample, f"{answer.task} lacks a sample"
            samples.append([answer.reward, *map(answer.components.get, names)])
        return {"weights": self.weights, "components": names, "answers": arms}


def _from_row(
    arm: str, task: str, sample: int, names: Sequence[str], row: Sequence[float | None]
) -> dict[str, Any]:
    """An answer of a number's table. Raises ValueError where values are missing or too many."""
    reward, *values = row
    components = {
        name: value for name, value in zip(names, values, strict=True) if value is not None
    }
    return {
        "arm": arm,
        "task": task,
        "sample": sample,
        "reward": reward,
        "components": components,
    }


class ProtocolFile(_Strict):
    """The content of a protocol's file.

    ``hash`` is over ``protocol``, and names it; ``checksum`` is over all the rest of the file.
    ``code`` is recorded, and is not a part: a commit does not make another protocol.
    """

    schema_name: str = Field(alias="schema")
    hash: str
    protocol: dict[str, Any]
    code: dict[str, str] = {}
    measured: Measurement
    number: MeasuredNumber
    checksum: str


def hash_of(value: Any) -> str:
    """16 hex digits of SHA-256 over the value as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def printed(*command: str) -> list[str]:
    """Return the lines that a program prints; none where it cannot be asked."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=QUESTION_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.splitlines()


def number(weights: str, items: Iterable[Item]) -> MeasuredNumber:
    """The scores of an evaluation's items, as they are published."""
    names = ScoredAnswer.model_fields
    answers = [
        ScoredAnswer.model_validate({name: getattr(item, name) for name in names})
        for item in sorted(items, key=lambda item: item.key)
        if item.arm in ARMS
    ]
    return MeasuredNumber(weights=weights, answers=answers)


def write(
    file: Path, parts: Parts, code: Code, measured: Measurement, result: MeasuredNumber
) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "hash": hash_of(parts),
        "protocol": dict(parts),
        "code": dict(code),
        "measured": measured.model_dump(),
        "number": result.table(),
    }
    record["checksum"] = hash_of(record)
    # A line for each key of the upper levels: short, and a difference of two files can be read.
    write_whole(file, (_in_lines(record, 3) + "\n").encode())


def _in_lines(value: Any, depth: int, indent: str = "") -> str:
    if not isinstance(value, dict) or not value or not depth:
        return json.dumps(value, allow_nan=False)
    inner = indent + " "
    lines = [
        f"{inner}{json.dumps(key)}: {_in_lines(part, depth - 1, inner)}"
        for key, part in value.items()
    ]
    body = ",\n".join(lines)
    return f"{{\n{body}\n{indent}}}"


def read(file: Path) -> ProtocolFile:
    """The content of a protocol's file.

    Raises ConfigError for another file, another schema, and one that was edited.
    """
    try:
        record = json.loads(content(file, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not a protocol's file: {error}") from error
    name = record.get("schema") if isinstance(record, dict) else None
    if name not in (FIRST_SCHEMA, SCHEMA):
        raise ConfigError(
            f"{file} has the schema {short(name)}, and this version of rayloop reads {SCHEMA}:"
            " use the version that wrote it, or measure again with --protocol"
        )
    try:
        published = ProtocolFile.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file} is not a protocol's file: {place}: {first['msg']}") from error
    rest = {key: value for key, value in record.items() if key != "checksum"}
    if hash_of(rest) != published.checksum:
        raise ConfigError(
            f"{file} was edited after it was written: its content has another hash. Take it as it"
            " was published, and change a part on the command line: --like FILE key.sub=value"
        )
    # Without the code, a protocol of the first schema has the hash that it has today.
    code = published.protocol.pop(CODE, published.code)
    return published.model_copy(update={"hash": hash_of(published.protocol), "code": code})


def differences(then: Parts, now: Parts) -> dict[str, tuple[Any, Any]]:
    """Each part that differs by its dotted name: the value then, and the value now."""
    old = flat(then)
    new = flat(now)
    both = {key: (old.get(key, UNKNOWN), new.get(key, UNKNOWN)) for key in sorted({*old, *new})}
    return {key: values for key, values in both.items() if values[0] != values[1]}


@dataclass(frozen=True)
class Published:
    """A number to compare with, from ``file``.

    ``fixed``: the beginnings of the names of parts that must be the same.
    """

    file: Path
    then: ProtocolFile
    fixed: tuple[str, ...] = ()

    def check(self, parts: Parts) -> None:
        """Raises ConfigError where a part differs that must not."""
        for key, (old, new) in differences(self.then.protocol, parts).items():
            if key.startswith(self.fixed):
                raise ConfigError(
                    f"{self.file} was measured by another protocol: {key} was {short(old)} and is"
                    f" {short(new)}. Set it back, name another file, or compare all the same with"
                    " --like FILE and --data FILE or key.sub=value"
                )

    def comparison(
        self, parts: Parts, code: Code, now: MeasuredNumber, items: Sequence[Item]
    ) -> Iterator[str]:
        """Lines on the parts and code that differ, and on the paired differences of the scores."""
        changes = differences(self.then.protocol, parts)
        which = "another protocol. Parts that differ:" if changes else "the same protocol"
        yield f"compared with {self.file}, {self.then.hash}, by {which}"
        for key, (old, new) in changes.items():
            yield f"  {key}: {short(old)} -> {short(new)}"
        then = self.then.code
        # Two commits of the same source do not differ.
        if then.get("source") != code["source"]:
            yield f"the code differs: {' '.join(then.values())} -> {' '.join(code.values())}"
        weights = "the same" if now.weights == self.then.number.weights else "other"
        yield f"{weights} weights, paired by task:"
        before = [answer.item for answer in self.then.number.answers]
        for arm in ARMS:
            for name, pair in sorted(pairs(of_arm(items, arm), of_arm(before, arm)).items()):
                yield f"  {arm} {name}: {_pair(pair)}"


def _pair(pair: Pair) -> str:
    mean, low, high = pair.gain
    bounds = "[too few tasks]"
    if low is not None and high is not None:
        meaning = "holds 0" if low <= 0 <= high else "does not hold 0"
        bounds = f"[{low:+.3f}, {high:+.3f}], which {meaning}"
    return f"{pair.before:.3f} -> {pair.after:.3f}, {mean:+.3f} {bounds}; {pair.tasks} tasks"
