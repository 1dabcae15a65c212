"""``python -m rayloop eval``: a checkpoint is evaluated on held-out rows, item by item.

The actors of training play and score them.
"""

import asyncio
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rayloop.actors.base import Actor
from rayloop.actors.failures import cause
from rayloop.actors.handles import Handle, create, submit
from rayloop.actors.lease import Lease
from rayloop.actors.rollout import RolloutActor, start_weights
from rayloop.cluster.services import Services
from rayloop.cluster.session import session
from rayloop.cluster.supervision.attempts import EpisodeRunner, evaluate_answers
from rayloop.config.settings import dump
from rayloop.core import incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.events import Event
from rayloop.core.failures import ConfigError, RayloopError
from rayloop.core.files import needed, write_whole
from rayloop.core.groups import Member
from rayloop.core.types import Task
from rayloop.data.cursor import evenly
from rayloop.data.dataset import Dataset
from rayloop.grpo.alarms import grader_error
from rayloop.measure.controls import (
    RIGHT,
    SAMPLED,
    Item,
    by_column,
    over_cells,
    pass_rates,
    summarise,
)
from rayloop.measure.protocol import (
    MeasuredNumber,
    Measurement,
    Parts,
    Published,
    hash_of,
    number,
    write,
)
from rayloop.measure.report import table
from rayloop.rewards.settings import RewardSettings
from rayloop.run.config import RunConfig
from rayloop.run.demand import bundles, total
from rayloop.run.folder import is_answer, make_folder
from rayloop.run.held_out import AnswerRequest, answer_requests, blind, read_items
from rayloop.run.lifetime import EvaluationSettings, right
from rayloop.run.preflight import Prepared
from rayloop.run.protocols.conditions import code, conditions
from rayloop.run.records.events import EventLog
from rayloop.run.records.jsonl import JsonLines
from rayloop.run.records.rollouts import RolloutDump
from rayloop.transports.seam import WeightUpdate
from rayloop.transports.settings import ObjectStoreTransport

EVALUATION_COROUTINES = 10_000


class NothingScored(RayloopError):
    """No answer of an evaluation could be scored, so it has no result."""


def evaluate(
    prepared: Prepared,
    measured: Measurement,
    out: Path,
    *,
    controls: bool,
    address: str | None,
    temporary: str | None,
    published: Published | None = None,
    file: Path | None = None,
) -> int:
    """Evaluate the run's model as ``measured`` says into ``out``, continuing from its results.

    Answers that were cut are played again, up to ``retries`` times, with twice the tokens. The
    number is compared with the ``published`` one, and written into a new ``file``. Returns 0, or 1
    when some answers have no score. Raises ConfigError when ``out`` has another evaluation.
    """
    config = prepared.config
    data = measured.data
    tasks = evenly(list(_read(data, config)), config.evaluation.limit)
    answers = answer_requests(config, tasks, controls=controls, samples=measured.samples)
    blinds = _blind_items(config, data, tasks) if controls else []
    make_folder(out, "--out")
    # After the folder is made: it keeps the date that the
    # chat template shows, for a continued evaluation.
    prepared = prepared.begun(out)

    parts = conditions(prepared, data, tasks, measured.samples, measured.retries)
    if published is not None:
        published.check(parts)
    identity = _evaluation_identity(prepared, data, measured.retries)
    # More samples may be added to a folder later.
    identity["protocol"] = hash_of({**parts, "attempts": {}})
    # A number is of one code, which is recorded with it.
    identity["code"] = code()["source"]
    items, reason = _played(
        prepared, out, answers, identity, measured.retries, address=address, temporary=temporary
    )
    unscored = len({_key(answer) for answer in answers}) - len(items)
    items += blinds
    summary = {"identity": identity, "data": data, "protocol": hash_of(parts)}
    summary |= summarise(items, unscored)
    summary |= _more(config.evaluation, tasks, items)
    _write_results(out, measured.benchmark, config.model.path, summary, items)

    lines = list(table(summary))
    if reason:
        lines.append(f"the first without a score: {reason}")
    result = number(identity["weights"], items)
    if published is not None:
        lines += published.comparison(parts, code(), result, items)
    if file is not None and not file.exists():
        lines.append(_published(file, prepared, parts, measured, result, unscored))
    print("\n".join(lines))
    return 1 if unscored else 0


def _played(
    prepared: Prepared,
    out: Path,
    answers: Sequence[AnswerRequest],
    identity: dict[str, str],
    retries: int,
    *,
    address: str | None,
    temporary: str | None,
) -> tuple[list[Item], str]:
    """The items of all answers, those on record included, and why the first has no score.

    Raises NothingScored, and ConfigError when ``out`` has another evaluation.
    """
    items_file = out / "items.jsonl"
    recorded = read_items(items_file)
    # Before anything is played: answers of two configurations must not mix in one folder.
    _claim(out / "identity.json", identity, empty=not recorded)
    missing = _missing(prepared.config.reward, answers, {item.key for item in recorded})
    print(
        f"{len(answers)} answers to play, {len(answers) - len(missing)} of them on record in {out}",
        flush=True,
    )
    reason = ""
    if missing:
        reason = _evaluate_on_ray(prepared, out, missing, retries, address, temporary)

    keys = {_key(answer) for answer in answers}
    items = _newest_items(items_file, keys)
    if keys and not items:
        raise NothingScored(
            f"none of {len(keys)} answers has a score, so there is nothing to report. The first:"
            f" {reason}. Fix that, and run the command again; {out}/events.jsonl has all reasons"
        )
    return items, reason


def _published(
    file: Path,
    prepared: Prepared,
    parts: Parts,
    measured: Measurement,
    result: MeasuredNumber,
    unscored: int,
) -> str:
    """Write the number and its protocol, if all answers have a score; returns a line on it."""
    if unscored:
        return f"{file} is not written: the number is not complete"
    config = {**measured.config}
    config["evaluation"] = {**config["evaluation"], "samples": measured.samples}
    # The time that the chat template shows is a part of the prompt.
    variables = dict(prepared.config.model.chat_template_kwargs)
    config["model"] = {**config["model"], "chat_template_kwargs": variables}
    again = measured.model_copy(update={"config": config})
    with needed(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, parts, code(), again, result)
    return f"protocol {hash_of(parts)} and number: {file}"


def _blind_items(config: RunConfig, data: str, tasks: Sequence[Task]) -> list[Item]:
    """The items of the blind prior, which answers without the image."""
    if not any(task.images for task in tasks):
        print(f"no row of {data} shows an image: --controls has no wrong image to play")
    return blind(config.evaluation.blind, _read(config.data.train, config), tasks)


def _write_results(
    out: Path, benchmark: str, model: str, summary: Mapping[str, Any], items: Sequence[Item]
) -> None:
    """Write the summary, and the results with the scores of each task."""
    _write_json(out / "summary.json", summary)
    scores = {item.task: item.scores for item in items if item.arm == RIGHT and item.sample == 0}
    results = {"benchmark": benchmark, "model": model, **summary, "tasks": scores}
    _write_json(out / "results.json", results)


def _evaluation_identity(prepared: Prepared, data: str, retries: int) -> dict[str, str]:
    """The configuration, weights and rows of an evaluation; its folder has one identity.

    The weights of a model of the Hub are its commit.
    """
    config = prepared.config
    weights = config.engine.own_weights
    if not weights:
        files = prepared.model.files
        weights = files.commit or _sha256(files.weights)
    identity = {"config": config_hash(config), "weights": weights, "data": _sha256([Path(data)])}
    if retries:
        identity["retries"] = str(retries)
    return identity


def _evaluate_on_ray(
    prepared: Prepared,
    out: Path,
    missing: list[AnswerRequest],
    retries: int,
    address: str | None,
    temporary: str | None,
) -> str:
    """Play ``missing`` in a cluster, and return as ``Evaluator.main`` does."""
    config = prepared.config
    room = prepared.store
    logs = out / "logs"
    make_folder(logs, "--out")
    needed_resources = total(bundles(config, trains=False))
    with session(needed_resources, address, temporary, logs, store=room):
        # It waits most of the time, so it takes no CPU away from the actors that it owns.
        options = {"num_cpus": 0, "max_concurrency": EVALUATION_COROUTINES}
        actor = create(Evaluator, options, config, str(out.resolve()))
        try:
            return str(ray.get(submit(actor, Evaluator.main, missing, retries)))
        except ray.exceptions.RayTaskError as error:
            if isinstance(cause(error), RayloopError):
                raise cause(error) from error
            raise
        finally:
            # Its death ends the actors that it owns.
            ray.kill(actor)


def _key(answer: AnswerRequest) -> tuple[str, str, int]:
    return answer.arm, answer.task.id, answer.sample


def _newest_items(file: Path, keys: Collection[tuple[str, str, int]]) -> list[Item]:
    """The items of these answers.

    A group that is scored together is played again as a whole: the last answer of a key counts.
    """
    newest = {item.key: item for item in read_items(file)}
    return [item for key, item in newest.items() if key in keys]


def _more(
    settings: EvaluationSettings, tasks: Sequence[Task], items: Sequence[Item]
) -> dict[str, Any]:
    """More results of an evaluation.

    Means ``by`` each column that the configuration names, ``pass_at`` k of the sampled answers, and
    how many answers are ``cut``.
    """
    means_by_column = {name: by_column(items, _column_values(tasks, name)) for name in settings.by}
    cells = {name: over_cells(rows) for name, rows in means_by_column.items() if "+" in name}
    threshold = right(settings.solved)
    arm = SAMPLED if settings.greedy else RIGHT
    return {
        "by": means_by_column,
        "cells": cells,
        "pass_at": pass_rates(items, *threshold, arm),
        "solved": "{} >= {:g}".format(*threshold),
        "cut": sum(item.cut for item in items),
    }


def _column_values(tasks: Sequence[Task], name: str) -> dict[str, str]:
    """The value of a column, or of several joined by "+", for each task."""
    columns = name.split("+")
    values = {}
    for task in tasks:
        parts = [str(task.extra.get(column, "")) for column in columns]
        values[task.id] = " ".join(parts)
    return values


def _missing(
    reward: RewardSettings,
    answers: Sequence[AnswerRequest],
    recorded: Collection[tuple[str, str, int]],
) -> list[AnswerRequest]:
    """The answers that are not on record.

    With ``reward.per: group``, all answers of a group in which one is missing.
    """
    missing = [answer for answer in answers if _key(answer) not in recorded]
    if reward.per == "trajectory":
        return missing
    groups = {(answer.arm, answer.task.id) for answer in missing}
    return [answer for answer in answers if (answer.arm, answer.task.id) in groups]


class Evaluator(Actor):
    """The actor that owns the others during an evaluation, and writes the items."""

    def __init__(self, config: RunConfig, out: str) -> None:
        # Without a policy, the weights come from the object store.
        weight_sync = config.weight_sync.model_copy(update={"transport": ObjectStoreTransport()})
        self.config = config.model_copy(update={"weight_sync": weight_sync})
        self.out = Path(out)
        self.items = JsonLines(self.out / "items.jsonl", is_answer)
        self.events = EventLog(self.out / "events.jsonl")
        self.images = RolloutDump(self.out, is_answer)
        self.weights: WeightUpdate[Any] | None = None
        self.why = ""
        self.trace = ""
        self.retries = 0

    async def main(self, missing: Sequence[AnswerRequest], retries: int = 0) -> str:
        """Play the ``missing`` answers.

        Returns why the first item without a score has none; "" when all have one.
        """
        services = Services(self.config, str(self.out), self._emit)
        self.runner = EpisodeRunner(
            self.config, services, ray.get_runtime_context().current_actor, self._emit
        )
        try:
            if not self.config.engine.own_weights:
                start = await asyncio.to_thread(
                    start_weights, self.config.model, self.config.engine.dtype
                )
                self.weights = WeightUpdate(start.manifest, ray.put(start.source))
            await services.start(self._admit)
            # A single member cannot be played again where the reward compares the group.
            if self.config.reward.per != "trajectory":
                retries = 0
            await self._all(missing, retries)
        finally:
            services.stop()
        return self.why

    async def _all(self, missing: Sequence[AnswerRequest], retries: int) -> None:
        """Play ``missing``, then up to ``retries`` times the cut answers with twice the tokens."""
        for self.retries in reversed(range(retries + 1)):
            items = await evaluate_answers(missing, self.runner, 0, self._keep, self._report)
            missing = [
                _with_twice_the_tokens(answer)
                for answer, item in zip(missing, items, strict=True)
                if item.cut
            ]
            if not missing:
                return

    async def lease_engine(self, episode: str, lost: int, why: str) -> Lease[RolloutActor]:
        """Lease another engine for an episode whose request failed on engine ``lost``.

        Environment actors call it.
        """
        return await self.runner.calls.replace_engine(episode, lost, why)

    async def _admit(self, engine: Handle[RolloutActor]) -> None:
        if self.weights is None:
            return
        loaded = submit(engine, RolloutActor.load, self.weights.manifest, self.weights.source)
        await with_deadline(self.config.sync_timeout, loaded, "load of a rollout engine", engine)

    def _keep(self, item: Item, images: dict[str, bytes]) -> None:
        if item.reward is None:
            self.why = self.why or f"{item.task}: {item.unscored}"
            self._emit(incidents.ItemUnscored(item.arm, item.task, why=item.unscored or ""))
            return
        # It is played again with twice the tokens; only the last try is recorded as cut.
        if item.cut and self.retries:
            return
        with needed(self.items.path):
            # Images first: a killed evaluation continues
            # from its items, and each must have its images.
            self.images.keep(images)
            self.items.append(asdict(item))
            # JsonLines keeps what the storage refuses, but
            # unrecorded answers would be lost with this process.
            if self.items.trouble is not None:
                raise self.items.trouble

    def _report(self, member: Member) -> None:
        """Emit the first traceback of the reward."""
        if member.outcome.trace and not self.trace:
            self.trace = member.outcome.trace
            self._emit(grader_error(member))

    def _emit(self, event: Event) -> None:
        self.events.emit(event)


def _with_twice_the_tokens(answer: AnswerRequest) -> AnswerRequest:
    sampling = replace(answer.sampling, max_tokens=2 * answer.sampling.max_tokens)
    return replace(answer, sampling=sampling)


def config_hash(config: RunConfig) -> str:
    """16 hex digits over the settings that decide the answers: all but the run's name and paths."""
    model = config.model.model_copy(update={"path": "", "revision": None})
    config = config.model_copy(update={"name": "x", "output": "", "model": model})
    return hashlib.sha256(dump(config).encode()).hexdigest()[:16]


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{file} is not a file; data files are JSONL, a JSON array or parquet"
            )
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: str, config: RunConfig) -> Dataset:
    leave_out = partial(print, "left out:", flush=True)
    return config.data.rows(path, leave_out, config.environment.kinds)


def _claim(file: Path, identity: dict[str, str], *, empty: bool) -> None:
    """Write the identity of an evaluation into its folder.

    Raises ConfigError when the folder has answers of another one.
    """
    if not empty and file.exists():
        claimed = json.loads(file.read_text(encoding="utf-8"))
        if claimed != identity:
            names = ", ".join(name for name in identity if claimed.get(name) != identity[name])
            raise ConfigError(
                f"{file.parent} holds an evaluation with another {names}; name another folder with"
                " --out"
            )
    write_whole(file, (json.dumps(identity) + "\n").encode())


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    write_whole(file, (json.dumps(value, indent=1) + "\n").encode())
