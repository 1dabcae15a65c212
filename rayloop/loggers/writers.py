"""Loggers for TensorBoard and Weights & Biases.

Each needs the extra of its name, which is imported when a run uses it.
"""

import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayloop.core.files import write_whole


class TensorBoard:
    """A logger that writes scalars to a new event file below ``folder``.

    TensorBoard reads it together with the files of earlier drivers.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._session = SessionLog
        self._summary = Summary
        self._next_step: int | None = None
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the scalars of a step."""
        # In a new file, or after a restore, the reader must forget this step and later ones.
        if step != self._next_step:
            self._write(step=step, session_log=self._session(status=self._session.START))
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in metrics.items()
            if tag != "step"
        ]
        self._write(step=step, summary=self._summary(value=values))
        self._next_step = step + 1

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


class Wandb:
    """One run of Weights & Biases for all drivers of a rayloop run.

    After a restore it shows the repeated steps twice. ``folder`` holds its id. ``config`` is shown
    as the run's configuration.
    """

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        import wandb

        folder.mkdir(exist_ok=True)
        id_file = folder / "id"
        if not id_file.exists():
            write_whole(id_file, secrets.token_hex(4).encode())
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rayloop"),
            name=name,
            config=dict(config),
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(folder.parent),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        # W&B's own step only counts up, and it would refuse a repeated one.
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish W&B's run."""
        self._run.finish()
