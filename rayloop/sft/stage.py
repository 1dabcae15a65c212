"""Supervised steps on the answers of the training rows, before GRPO, on the same engine.

The gradient of the log-likelihood is the policy gradient with advantage 1 at ratio 1.
cluster/stages/sft.py runs the stage.
"""

import random
import tempfile
import time
from collections.abc import Iterable
from itertools import chain, groupby, zip_longest
from pathlib import Path
from statistics import mean
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from rayloop.chat.rendering import Rendered, Renderer
from rayloop.chat.tokenizer import read_json
from rayloop.config.model import Dtype
from rayloop.config.settings import Component, LocalPath, SettingsModel
from rayloop.core.protocols import TrainItem
from rayloop.core.types import (
    EndReason,
    Message,
    Sampling,
    Streams,
    Task,
    TokenIds,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.engines.shape import ModelSource
from rayloop.envs.grammar.choice import Model, chosen, spoken
from rayloop.envs.grammar.family import AUTO, LANGUAGE, LanguageChoice
from rayloop.envs.grammar.screens import asked_in
from rayloop.envs.history.contexts import Contexts, context_turn
from rayloop.envs.history.past import AnswerReader, Past
from rayloop.envs.history.policies import HISTORY, WINDOW, component, of_language
from rayloop.run.sections import DataSettings, Placement
from rayloop.sft.answers import ANSWERS, built, checked

START = Version(0, 0)
SUPERVISED = Streams(rl=0.0, ref_kl=0.0, ce=1.0)
ASSISTANT = "assistant"


class TinySettings(SettingsModel):
    """A tiny random model, made at ``model.path`` when that folder does not exist.

    Its tokenizer learns the rows' texts.
    """

    vision: bool = True
    """Off makes a text-only model, for tasks without images and quick tests."""
    sizes: dict[str, int | float | bool] = {}
    """Fields of rayloop.engines.tiny_vlm.TinySizes (2 to 3 M parameters).

    Raise them when the stage cannot fit its own rows.
    """
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Pixels (red, green, blue, 0..1) are normalised by mean and std.

    The defaults are Qwen2.5-VL's. With random weights, use the background's colour as mean:
    otherwise the constant background hides all differences.
    """
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    """The processor divides pixels by these. Smaller numbers raise the contrast."""


class SftConfig(SettingsModel):
    """``python -m rayloop sft CONFIG``."""

    output: LocalPath
    """Folder of the trained model, in Hugging Face layout, for ``model.path`` of a run."""
    seed: int = 0
    """Order of the rows, and random weights of a new tiny model.

    Change it to repeat the stage independently.
    """
    steps: int = Field(gt=0)
    """Optimizer updates in all: raise it while the loss still falls on held-out rows."""
    seconds: float | None = Field(None, gt=0)
    """Stop after this long, if that comes before ``steps``: for comparisons at equal time."""
    save_every: int | None = Field(None, gt=0)
    """Steps after which the model is also written, as ``output``/step_<N>.

    Its loss is measured on ``data.eval``, as at the end, to choose one on held-out rows.
    """
    best: bool = False
    """Whether ``output`` has the weights of the lowest held-out loss, instead of the last ones.

    Set it where a stage may be longer than its rows allow.
    """
    dtype: Dtype = "float32"
    """Type of the written weights; bfloat16 halves the files.

    Training has ``engine.dtype`` over float32 master weights.
    """
    batch_size: int = Field(32, gt=0)
    """Rows per optimizer update, spread over the workers.

    Larger batches are smoother, and take longer each.
    """
    workers: int = Field(1, ge=1)
    """FSDP world size: one Ray Train worker per rank.

    Raise it for GPUs; the result does not depend on it.
    """
    placement: Placement = Placement()
    """The resources of one worker: a GPU each on machines with GPUs."""
    checkpoint_every: int = Field(100, gt=0)
    """Steps between checkpoints.

    The stage continues from the last one when a worker dies or the command is run again. Lower it
    where machines may be taken away.
    """
    max_failures: int = Field(3, ge=0)
    """How often the workers are restarted after one died.

    Raise it where machines may be taken away.
    """
    start_timeout: float = Field(600.0, gt=0)
    """Seconds in which the cluster must have room for the workers.

    Raise it where nodes come late.
    """
    model: ModelSettings
    data: DataSettings
    answers: Annotated[Component, ANSWERS] = Component(use="rayloop.sft.answers:AnswerColumn")
    """The answers that the model learns.

    They are the rows' answers, a class of docs/components.md, or a function of ``(task)`` or
    ``(task, rng)`` that returns the text, for example ``{use: "mine:spoken"}``.
    """
    language: Annotated[LanguageChoice, LANGUAGE] = AUTO
    """The language whose prompt is around rows that only say a task: auto, a name or a file.

    As ``environment.language`` of a run.
    """
    history: Annotated[Component, HISTORY, BeforeValidator(component)] = Component(use=WINDOW)
    """What the model is shown of its past at each answer of a conversation.

    As ``environment.history`` of the run for which this is the warm start. The images of a whole
    prompt always stay; with earlier answers in it, as ``data convert`` writes rows, they are
    screens.
    """
    tiny: TinySettings | None = None
    engine: FsdpSettings = FsdpSettings()
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-3)
    """The optimizer, with the learning rate of a supervised stage, higher than a run's.

    A schedule ends with the stage.
    """
    log_every: int = Field(25, gt=0)
    """Steps between two lines on the terminal. Lower it to watch a short stage."""

    def speaking(self) -> Self:
        """The stage with the language of its model. Raises ConfigError as ``chosen``."""
        source = ModelSource(self.model.path, self.model.revision)
        model = Model(source.path, read_json(source.files.folder / "config.json"))
        language = chosen(self.language, model, "language")
        stage = self.model_copy(update={"language": language})
        return spoken(stage, language, model, "language")

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.best and (self.data.eval is None or self.save_every is None):
            raise ValueError(
                "best needs data.eval and save_every: it chooses among the models that are written"
                " and measured"
            )
        return self


class Examples:
    """Makes trajectories of rows: the answer's turns are the sampled ones."""

    def __init__(self, config: SftConfig) -> None:
        self.renderer = Renderer(config.model)
        self.language = config.language
        self.answers = built(config.answers)
        self.spoken: LanguageChoice = "" if config.language == AUTO else config.language
        self.history = of_language(config.history, self.spoken, "computer", "the stage")
        self.reader = AnswerReader(self.spoken)
        self.sampling = self.renderer.sampling(Sampling())

    def item(self, task: Task, rng: random.Random) -> TrainItem:
        """The row's training item. Raises DataFailure for an unusable image."""
        turns: list[Turn] = []
        images: dict[str, bytes] = {}
        answer_ids = TokenIds()
        text = ""

        def show(role: str, rendered: Rendered) -> None:
            refs = tuple(image.ref for image in rendered.images)
            turns.append(Turn(role, rendered.token_ids, refs))
            for image in rendered.images:
                if image.data is not None:
                    images[image.ref.sha256] = image.data

        contexts = Contexts(self.renderer, self.history, self.spoken)
        prompt = contexts.begin(self._past(task), task.tools)
        show("prompt", self.renderer.prompt(prompt, task.tools))
        answer = checked(self.answers.answer(task, rng), task)
        for is_answer, messages in groupby(answer, key=_is_assistant):
            if is_answer:
                text = "".join(_texts(messages))
                answer_ids = self.renderer.answer(text, opening=True)
                logprobs = (0.0,) * len(answer_ids)
                turns.append(Turn(ASSISTANT, answer_ids, logprobs=logprobs, version=START))
                continue
            if not answer_ids:
                show("observation", self.renderer.observation(list(messages), ()))
                continue
            following = contexts.after(text, answer_ids, list(messages))
            if following.context is not None:
                show("context", following.context)
                turns[-1] = context_turn(turns[-1:])
            show("observation", following.observation)
        trajectory = Trajectory(
            TrajectoryId(0, 0),
            0,
            task.id,
            0,
            tuple(turns),
            self.sampling,
            EndReason.DONE,
            image_bytes=images,
        )
        return TrainItem(trajectory, advantage=0.0, streams=SUPERVISED)

    def _past(self, task: Task) -> Past:
        """What comes before the answer. Raises DataFailure for an unusable image."""
        asked = asked_in(self.language, task).messages
        first, *earlier = [list(messages) for _, messages in groupby(asked, key=_is_assistant)]
        # The image of a row that only says a task is the first screen, and so is that of a row
        # with earlier answers.
        task_images = () if task.bare or earlier else tuple(task.images)
        past = Past(tuple(first), task_images=task_images)
        nothing: list[Message] = []
        exchanges = zip_longest(earlier[::2], earlier[1::2], fillvalue=nothing)
        for number, (said, observation) in enumerate(exchanges):
            answer = self.reader.answer(number, "".join(_texts(said)))
            past = past.followed_by(answer, observation)
        return past


def _is_assistant(message: Message) -> bool:
    return message.role == ASSISTANT


def _texts(messages: Iterable[Message]) -> list[str]:
    parts = chain.from_iterable(message.parts for message in messages)
    return [part for part in parts if isinstance(part, str)]


def make_tiny(config: SftConfig) -> None:
    """Make the model of ``config.tiny`` unless it exists. Raises ConfigError, DataFailure."""
    path = Path(config.model.path)
    if config.tiny is None or path.exists():
        return
    from rayloop.engines.tiny_vlm import write_tiny_vlm

    dataset = config.data.rows(config.data.train, lambda failure: None)
    answers = built(config.answers)
    rng = random.Random(config.seed)
    texts: list[str] = []
    for task in dataset:
        answer = checked(answers.answer(task, rng), task)
        texts += _texts((*task.messages, *answer))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:
        model = write_tiny_vlm(
            Path(folder) / "model",
            texts,
            vision=config.tiny.vision,
            seed=config.seed,
            extra_tokens=getattr(answers, "tokens", ()),
            image_mean=config.tiny.image_mean,
            image_std=config.tiny.image_std,
            **config.tiny.sizes,
        )
        # The rename comes last: a later start takes the folder for the model without looking
        # into it.
        model.rename(path)


class SftProgress:
    """Makes the lines of progress, with means since the last line.

    ``spent``: seconds before this part of the stage.
    """

    def __init__(self, spent: float = 0.0) -> None:
        self._last = time.monotonic()
        self._began = self._last - spent
        self.rows = 0
        self._reports: list[dict[str, float]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the stage began, earlier parts included."""
        return time.monotonic() - self._began

    def add(self, report: dict[str, float], rows: int) -> None:
        """Count one optimizer update, its metrics and its number of rows."""
        self._reports.append(report)
        self.rows += rows

    def line(self, step: int) -> str:
        """The line of the updates since the last line."""
        now = time.monotonic()
        # The rollout log-probs of an answer are 0, so the mismatch is its loss per token.
        loss = mean(report["actor/logprob_mismatch_mean"] for report in self._reports)
        report = self._reports[-1]
        rate = self.rows / (now - self._last)
        self._last = now
        self.rows = 0
        self._reports = []
        return (
            f"step {step}  {now - self._began:.0f} s  {rate:.0f} rows/s  loss {loss:.4f}  "
            f"grad norm {report['actor/grad_norm']:.2f}  lr {report['actor/lr']:.1e}"
        )
