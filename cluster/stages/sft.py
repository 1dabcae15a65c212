"""The supervised stage on Ray Train.

Each worker of a TorchTrainer is one rank of the trainer; the ranks are started again from the last
checkpoint when one dies. ``output``/run has progress.txt, logs, and the checkpoints until the stage
has ended.
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
from rayloop.core.types import Task, derive
from rayloop.data.cursor import TaskCursor
from rayloop.data.dataset import Dataset
from rayloop.engines.machine import grow_segments, per_process
from rayloop.engines.shape import ModelSource
from rayloop.engines.training_settings import COLLECTIVE_TIMEOUT_S
from rayloop.estimate.memory import fitted
from rayloop.grpo.losses.settings import ReinforceLoss
from rayloop.launch.signals import STOP, StopSignals, handling
from rayloop.run.folder import make_folder
from rayloop.run.preflight import dated
from rayloop.sft.stage import START, Examples, SftConfig, SftProgress, make_tiny

RUN = "run"
PROGRESS = "progress.txt"
CHECKPOINTS = "checkpoints"
STATE = "state.json"
POLL_INTERVAL_S = 0.5
"""Seconds between two looks at the progress."""


def sft(config: SftConfig, address: str | None, temporary: str | None) -> int:
    """Train, or continue from the last checkpoint, and write the model.

    Returns 0; raises RayloopError.
    """
    folder = local_path(config.output) / RUN
    make_folder(folder / "logs", "output=FOLDER")
    placement = config.placement
    stop = StopSignals()
    logs = folder / "logs"
    per_worker = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    needed = {name: config.workers * amount for name, amount in per_worker.items()}
    # The handler comes after ray.init, which installs its own.
    with session(needed, address, temporary, logs), handling(stop, *STOP):
        # ``max_failures`` already counts restarts; retries of Ray's task would come on top.
        fit = ray.remote(num_cpus=0, max_retries=0)(_fit)
        _follow(fit.remote(config), folder / PROGRESS, stop)
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
            ended, _ = ray.wait([running], timeout=POLL_INTERVAL_S)
            print(progress.read(), end="", flush=True)
    if not ended:
        raise Preempted("stopped; the same command continues from the last checkpoint")
    try:
        ray.get(running)
    except RayTaskError as error:
        raise cause(error) from error


def _fit(config: SftConfig) -> None:
    """Run the trainer, in its own process, since it imports torch. Raises RayloopError."""
    from ray.train import TrainingFailedError

    # Relative paths of the configuration keep their meaning.
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    # Ray Train reads this limit from the environment only.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(config.start_timeout)

    make_tiny(config)
    source = ModelSource(config.model.path, config.model.revision)
    model = dated(config.model, source.files.folder, local_path(config.output) / RUN, {})
    has_gpus = config.placement.num_gpus > 0
    engine = fitted(config.engine, source.shape, config.workers, has_gpus)
    trainer = _torch_trainer(config.model_copy(update={"model": model, "engine": engine}))
    try:
        failure = trainer.fit().return_value
    except TrainingFailedError as error:
        raise PolicyLost(
            f"the supervised stage failed more often than max_failures ({config.max_failures})"
            f" allows: {error}"
        ) from error
    if failure is not None:
        raise failure


def _torch_trainer(config: SftConfig) -> Any:
    """Ray Train's trainer of the stage."""
    import torch
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    placement = config.placement
    has_gpus = placement.num_gpus > 0
    # As the engine chooses its device: a worker without a reserved GPU sees the GPUs of its node.
    backend = "cpu:gloo,cuda:nccl" if has_gpus or torch.cuda.is_available() else "gloo"
    resources = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    return TorchTrainer(
        run_rank,
        train_loop_config={"config": config},
        torch_config=TorchConfig(backend=backend, timeout_s=math.ceil(COLLECTIVE_TIMEOUT_S)),
        scaling_config=ScalingConfig(
            num_workers=config.workers,
            use_gpu=has_gpus,
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
        self.config = config
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()

        self.output = local_path(config.output)
        self.dataset = self._read(config.data.train)
        self.held_out = () if config.data.eval is None else self._read(config.data.eval)
        # The lowest held-out loss, and its step.
        self.best = (math.inf, 0)

        self.cursor = TaskCursor(len(self.dataset), config.seed, config.data.shuffle)
        self.examples = Examples(config)

        engine = config.engine
        # On a CPU the ranks of this machine share its cores.
        if not engine.threads and not config.placement.num_gpus:
            threads = per_process(context.get_local_world_size())
            engine = engine.model_copy(update={"threads": threads})
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
            self._say(f"the weights are from step {self.best[1]}")
            shutil.copytree(self._snapshot(self.best[1]), self.output, dirs_exist_ok=True)
        self.engine.close()

    def _read(self, path: str) -> Dataset:
        return self.config.data.rows(path, lambda row: self._say(f"left out: {row}"))

    def _snapshot(self, step: int) -> Path:
        return self.output / f"step_{step}"

    def _share(self) -> list[TrainItem]:
        """This rank's rows of the next batch. Raises DataFailure on all ranks."""
        rows = [
            (self.dataset[self.cursor.next()], ("answer", self.step, number))
            for number in range(self.config.batch_size)
        ]
        return self._items(rows)

    def _items(self, rows: Sequence[tuple[Task, tuple[str | int, ...]]]) -> list[TrainItem]:
        """This rank's part of the rows. Each row comes with the names that seed its answer.

        Raises DataFailure on all ranks.
        """
        from rayloop.engines.training.sharding import on_all_ranks

        def read_items() -> list[TrainItem]:
            items = []
            for row, seed_names in rows[self.rank :: self.world_size]:
                draw = random.Random(derive(self.config.seed, *seed_names))
                items.append(self.examples.item(row, draw))
            return items

        return on_all_ranks(read_items)

    def _evaluate(self) -> None:
        """Measure the mean loss per answer token over the held-out rows, if there are any.

        Raises DataFailure on all ranks.
        """
        if not self.held_out:
            return
        from torch import device

        from rayloop.engines.training.sharding import total

        rows = [(row, ("held out", number)) for number, row in enumerate(self.held_out)]
        # As many at a time as an update has, for the memory.
        size = self.config.batch_size
        logprobs: list[Any] = []
        for start in range(0, len(rows), size):
            items = self._items(rows[start : start + size])
            logprobs += self.engine.logprobs([item.trajectory for item in items])

        rank_sum = sum(float(values.sum(dtype=float)) for values in logprobs)
        rank_tokens = sum(map(len, logprobs))
        logprob, tokens = total([rank_sum, rank_tokens], device("cpu"))
        loss = -logprob / tokens
        self.best = min(self.best, (loss, self.step))
        self._say(
            f"step {self.step}  held-out loss {loss:.4f}  {len(rows)} rows  {tokens:.0f} tokens"
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
        tensors = self.engine.export(START)
        if self.rank == 0:
            dtype = DTYPES[self.config.dtype]
            converted = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            source = resolve(self.config.model.path, self.config.model.revision).folder
            save_model(source, folder, converted, limits=self.config.model)

    def _checkpoint(self, report: dict[str, float]) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            # Every rank writes its part, and Ray Train puts the parts together.
            self.engine.save(folder)
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
                    f" that one again, or remove {self.output / RUN / CHECKPOINTS} to start over"
                )
            self.engine.load(folder)

        self.cursor.restore(state["cursor"])
        self.best = (*state["best"],)
        self._say(f"continues after step {state['step']}")
        return state["step"], state["seconds"]

    def _say(self, line: str) -> None:
        if self.rank == 0:
            with (self.output / RUN / PROGRESS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _identity(config: SftConfig) -> dict[str, Any]:
    """The settings that must not change when a stage continues.

    Micro-batches may change, with the machine's memory.
    """
    changeable = ("workers", "placement", "max_failures", "start_timeout", "log_every")
    exclude: dict[str, Any] = {**dict.fromkeys(changeable, True), "engine": {"micro_batch_tokens"}}
    return config.model_dump(mode="json", exclude=exclude)
