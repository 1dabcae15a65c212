"""The supervised stage on Ray Train: each worker of a TorchTrainer is one rank of the trainer,
started again from the last checkpoint when one dies. ``output``/run has progress.txt, logs, and the
checkpoints until the stage has ended.
"""

import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rayloop.actors.failures import cause
from rayloop.cluster.session import session
from rayloop.config.settings import local_path
from rayloop.core.failures import CheckpointError, PolicyLost, Preempted, RayloopError
from rayloop.core.model_files import resolve
from rayloop.core.protocols import TrainItem
from rayloop.core.signals import STOP, StopSignals, handling
from rayloop.core.types import Task, derive
from rayloop.data.cursor import TaskCursor
from rayloop.data.dataset import Dataset
from rayloop.engines.machine import grow_segments, per_process
from rayloop.engines.training_settings import COLLECTIVE_TIMEOUT
from rayloop.estimate.memory import fitted
from rayloop.estimate.shape import read_shape
from rayloop.grpo.losses.settings import ReinforceLoss
from rayloop.run.folder import make_folder
from rayloop.run.identity import dated
from rayloop.sft.stage import START, Examples, SftConfig, SftProgress, make_tiny

RUN, PROGRESS, CHECKPOINTS, STATE = "run", "progress.txt", "checkpoints", "state.json"
POLL = 0.5
"""Seconds between two looks at the progress."""


def sft(config: SftConfig, address: str | None, temporary: str | None) -> int:
    """Train, or continue from the last checkpoint, and write the model.

    Returns 0; raises RayloopError.
    """
    folder = local_path(config.output) / RUN
    make_folder(folder / "logs", "output=FOLDER")
    placement = config.placement
    stop = StopSignals()
    needed = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    with (
        session(
            {name: config.workers * n for name, n in needed.items()},
            address,
            temporary,
            folder / "logs",
        ),
        handling(stop, *STOP),  # behind ray.init, which has a handler of its own
    ):
        # ``max_failures`` already counts restarts; retries of Ray's task would come on top.
        _follow(ray.remote(num_cpus=0, max_retries=0)(_fit).remote(config), folder / PROGRESS, stop)
    _remove(folder / CHECKPOINTS)
    print(f"wrote {config.output}")
    return 0


def _remove(checkpoints: Path) -> None:
    """Remove the stage's checkpoints.

    Call it only at the end: until the model is written, a restart continues from them.
    """
    try:
        shutil.rmtree(checkpoints)
    except OSError as error:
        # The model is written, so this does not fail the stage.
        print(
            f"{checkpoints} could not be removed: {error}. Remove it: another start of the stage"
            " would continue from it"
        )


def _follow(running: Any, path: Path, stop: StopSignals) -> None:
    """Print what rank 0 writes to ``path`` until the stage ends.

    Raises what it raised, and Preempted.
    """
    path.touch()
    with path.open(encoding="utf-8") as progress:
        # An earlier start of the stage has shown the lines that it wrote.
        progress.seek(0, os.SEEK_END)
        ended: list[Any] = []
        while not ended and stop.first is None:
            ended, _ = ray.wait([running], timeout=POLL)
            print(progress.read(), end="", flush=True)
    if not ended:
        raise Preempted("stopped; the same command goes on from the last checkpoint")
    try:
        ray.get(running)
    except RayTaskError as error:
        raise cause(error) from error


def _fit(config: SftConfig) -> None:
    """Run the trainer, in a process of its own, since it imports torch. Raises RayloopError."""
    import torch
    from ray.train import (
        CheckpointConfig,
        FailureConfig,
        RunConfig,
        ScalingConfig,
        TrainingFailedError,
    )
    from ray.train.torch import TorchConfig, TorchTrainer

    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = (
        "0"  # relative paths of the configuration keep their meaning
    )
    # Ray Train reads this limit from the environment only.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(config.start_timeout)

    make_tiny(config)
    model = dated(config.model, local_path(config.output) / RUN)
    placement, gpu = config.placement, config.placement.num_gpus > 0
    shape = read_shape(config.model.path, config.model.revision)
    config = config.model_copy(
        update={"model": model, "engine": fitted(config.engine, shape, config.workers, gpu)}
    )

    resources = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"config": config},
        torch_config=TorchConfig(
            # as the engine chooses its device: a worker without a reserved GPU sees those of its
            # node
            backend="cpu:gloo,cuda:nccl" if gpu or torch.cuda.is_available() else "gloo",
            timeout_s=math.ceil(COLLECTIVE_TIMEOUT),
        ),
        scaling_config=ScalingConfig(
            num_workers=config.workers,
            use_gpu=gpu,
            resources_per_worker={name: amount for name, amount in resources.items() if amount},
        ),
        run_config=RunConfig(
            name=CHECKPOINTS,
            storage_path=str(local_path(config.output) / RUN),
            failure_config=FailureConfig(
                max_failures=config.max_failures, controller_failure_limit=config.max_failures
            ),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )

    try:
        failure = trainer.fit().return_value
    except TrainingFailedError as error:
        raise PolicyLost(
            f"the supervised stage failed more often than max_failures ({config.max_failures})"
            f" allows: {error}"
        ) from error
    if failure is not None:
        raise failure


def run_rank(arguments: dict[str, SftConfig]) -> RayloopError | None:
    """The function of a Ray Train worker.

    Returns a RayloopError, since Ray Train would retry one that is raised.
    """
    try:
        Rank(arguments["config"]).run()
    except RayloopError as failure:
        return failure
    return None


class Rank:
    """One rank: each takes its share of every batch, and rank 0 reports.

    Its methods are collective.
    """

    def __init__(self, config: SftConfig) -> None:
        # Before torch is imported, since its allocator reads the variable then.
        grow_segments()
        from rayloop.engines.training.fsdp import FsdpEngine

        context = ray.train.get_context()
        self.config, self.rank, self.world_size = (
            config,
            context.get_world_rank(),
            context.get_world_size(),
        )

        self.output = local_path(config.output)
        self.dataset = self._read(config.data.train)
        self.held_out = () if config.data.eval is None else self._read(config.data.eval)
        self.best = (math.inf, 0)  # the lowest held-out loss, and its step

        self.cursor = TaskCursor(len(self.dataset), config.seed, config.data.shuffle)
        self.examples = Examples(config)

        engine = config.engine
        if (
            not engine.threads and not config.placement.num_gpus
        ):  # on a CPU the ranks of this machine share its cores
            engine = engine.model_copy(
                update={"threads": per_process(context.get_local_world_size())}
            )
        self.engine = FsdpEngine(
            config.model,
            engine,
            config.optimizer.over(config.steps),
            ReinforceLoss(),
            rank=self.rank,
            world_size=self.world_size,
            init_method=None,
            seed=config.seed,
        )

        self.step, seconds = self._restored()
        self.progress = SftProgress(seconds)

    def run(self) -> None:
        """Train to the end and write the model. Raises RayloopError."""
        config = self.config
        while self.step < config.steps and not self._out_of_time():
            self.step += 1
            report = self.engine.train([self._share()])
            self.progress.add(report, config.batch_size)

            if self.step % config.log_every == 0:
                self._say(self.progress.line(self.step))
            if config.save_every is not None and self.step % config.save_every == 0:
                self._write_model(self._snapshot(self.step))
                self._evaluate()
            if self.step % config.checkpoint_every == 0:
                self._checkpoint(report)

        if self.progress.rows:
            self._say(self.progress.line(self.step))
        if config.save_every is None or self.step % config.save_every:
            self._evaluate()

        if not config.best or self.best[1] in (0, self.step):
            self._write_model(self.output)
        elif self.rank == 0:
            self._say(f"the weights are those of step {self.best[1]}")
            shutil.copytree(self._snapshot(self.best[1]), self.output, dirs_exist_ok=True)
        self.engine.close()

    def _read(self, path: str) -> Dataset:
        return Dataset(
            path,
            self.config.data.reader.build(),
            False,
            lambda row: self._say(f"left out: {row}"),
            anywhere=self.config.data.anywhere,
        )

    def _snapshot(self, step: int) -> Path:
        return self.output / f"step_{step}"

    def _share(self) -> list[TrainItem]:
        """This rank's rows of the next batch. Raises DataFailure on all ranks."""
        return self._items(
            [
                (self.dataset[self.cursor.next()], ("answer", self.step, n))
                for n in range(self.config.batch_size)
            ]
        )

    def _items(self, rows: Sequence[tuple[Task, tuple[str | int, ...]]]) -> list[TrainItem]:
        """This rank's part of the rows, each with what its answer is drawn by.

        Raises DataFailure on all ranks.
        """
        from rayloop.engines.training.sharding import on_all_ranks

        mine = rows[self.rank :: self.world_size]
        return on_all_ranks(
            lambda: [
                self.examples.item(row, random.Random(derive(self.config.seed, *by)))
                for row, by in mine
            ]
        )

    def _evaluate(self) -> None:
        """Measure the mean loss per answer token over the held-out rows, if there are any.

        Raises DataFailure on all ranks.
        """
        if not self.held_out:
            return
        from torch import device

        from rayloop.engines.training.sharding import total

        rows, size, found = (
            [(row, ("held out", n)) for n, row in enumerate(self.held_out)],
            self.config.batch_size,
            [],
        )
        for start in range(
            0, len(rows), size
        ):  # as many at a time as an update has, for the memory
            found += self.engine.logprobs(
                [item.trajectory for item in self._items(rows[start : start + size])]
            )

        logprob, tokens = total(
            [sum(float(one.sum(dtype=float)) for one in found), sum(map(len, found))], device("cpu")
        )
        self.best = min(self.best, (-logprob / tokens, self.step))
        self._say(
            f"step {self.step}  held-out loss {-logprob / tokens:.4f}  {len(rows)} rows "
            f" {tokens:.0f} tokens"
        )

    def _out_of_time(self) -> bool:
        if self.config.seconds is None:
            return False
        from ray.train.collective import broadcast_from_rank_zero

        # Clocks of the ranks differ: one that stopped alone would leave the others in a collective.
        return bool(broadcast_from_rank_zero(self.progress.seconds > self.config.seconds))

    def _write_model(self, folder: Path) -> None:
        """Write the present weights as a model folder."""
        from rayloop.engines.models.saving import save_model
        from rayloop.transports.manifest import DTYPES

        # Gathering is collective, so every rank calls it, and only the first one writes.
        dtype, tensors = DTYPES[self.config.dtype], self.engine.export(START)
        if self.rank == 0:
            source = resolve(self.config.model.path, self.config.model.revision).folder
            save_model(
                source,
                folder,
                {name: t.to(dtype) for name, t in tensors.items()},
                limits=self.config.model,
            )

    def _checkpoint(self, report: dict[str, float]) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            self.engine.save(folder)  # every rank writes its part, and Ray Train puts them together
            if self.rank == 0:
                state = {
                    "step": self.step,
                    "seconds": self.progress.seconds,
                    "cursor": self.cursor.state(),
                    "best": self.best,
                    "config": _identity(self.config),
                }
                (Path(folder) / STATE).write_text(json.dumps(state), encoding="utf-8")
            ray.train.report(
                {"step": self.step, **report},
                checkpoint=ray.train.Checkpoint.from_directory(folder),
            )

    def _restored(self) -> tuple[int, float]:
        """The steps and seconds done so far. Raises CheckpointError."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return 0, 0.0
        with checkpoint.as_directory() as folder:
            state = json.loads((Path(folder) / STATE).read_text(encoding="utf-8"))
            # Compared before the weights are loaded, whose shapes may differ.
            if state["config"] != _identity(self.config):
                raise CheckpointError(
                    f"{folder} is of a stage with another configuration, which was interrupted. Run"
                    f" that one again, or remove {self.output / RUN / CHECKPOINTS} to begin anew"
                )
            self.engine.load(folder)

        self.cursor.restore(state["cursor"])
        self.best = (*state["best"],)
        self._say(f"goes on after step {state['step']}")
        return state["step"], state["seconds"]

    def _say(self, line: str) -> None:
        if self.rank == 0:
            with (self.output / RUN / PROGRESS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _identity(config: SftConfig) -> dict[str, Any]:
    """The settings that must not change when a stage continues; micro-batches may, with the
    machine's memory.
    """
    others = ("workers", "placement", "max_failures", "start_timeout", "log_every")
    return config.model_dump(
        mode="json", exclude={**dict.fromkeys(others, True), "engine": {"micro_batch_tokens"}}
    )
