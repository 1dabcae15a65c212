"""The judge as a reward source: the verdict on every trajectory, or the configured policy.

A failed judge is never a zero.
"""

import asyncio
import json
import logging
from collections import deque
from typing import Literal

from prometheus_client import start_http_server
from pydantic import Field

from rayloop.config.settings import SettingsModel, local_path
from rayloop.core.failures import (
    ConfigError,
    DataFailure,
    InfrastructureFailure,
    RayloopError,
    RewardLost,
)
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.judge.api import (
    MAX_IMAGES,
    BackendLabel,
    JudgeItem,
    JudgeUnscored,
    JudgeVerdict,
    NoVerdict,
    Result,
)
from rayloop.judge.calibrate import DriftWatch
from rayloop.judge.client import ClientSettings, JudgeClient
from rayloop.judge.grader import decide
from rayloop.judge.prompt import sanitise
from rayloop.judge.rubric import FOLDER, canary, load_rubrics
from rayloop.judge.rules import decision as rules
from rayloop.judge.rules.plain import How, extract
from rayloop.judge.transport import EXCLUDED

logger = logging.getLogger(__name__)

_KINDS = {
    NoVerdict.INVALID: UnscoredKind.INVALID_REWARD,
    NoVerdict.UNAVAILABLE: UnscoredKind.REWARD_UNAVAILABLE,
    NoVerdict.TIMEOUT: UnscoredKind.TIMEOUT,
}
_SHARE = 0.9
"""The share of the time for scoring that may pass without a verdict."""
_THERE = 12.0
"""Seconds in which a judge says what it is when a person waits."""


class JudgeReward:
    """The verdict's score on the answer in the last sampled turn; 0 with the flag ``unparsable``
    when there is no answer. Components: ``correct`` and ``by_model`` (0 when a rule decided,
    without a request). ``judge_invalid`` flags an answer that made a judge in good health fail
    twice, ``judge_changed`` a verdict of another judge than the first of this process.
    """

    infrastructure = True

    class Settings(SettingsModel):
        """Which judge pays which answers, and the policy when it does not."""

        judge: ClientSettings = ClientSettings()
        """The judge's address, and how the client asks it."""
        rubric: str = "equivalence"
        """The name of a file in ``rubrics``.

        One with ``sees_images`` is sent the paths of the task's images.
        """
        rubrics: str = ""
        """A folder in place of judge/rubrics; the judge's own setting of this name must hold the
        same files.
        """
        answer: How = "tagged_box"
        """The place of the answer in the last turn. tag: the last ``<answer>...</answer>``. box: the last ``\\boxed{...}``.
        tagged_box: a box inside that answer block, or the block's text when it has no box; without a block there is no answer, and
        a bare "3" scores 0 (``unparsable``). last_line, whole: no markup is needed. Choose the one that the prompt asks for."""
        rules_first: bool = True
        """Whether rules decide what they can in the run's own process; the judge is asked only the
        rest.
        """
        on_unavailable: Literal["wait", "exclude", "stop"] = "wait"
        """No verdict: wait for nine tenths of ``reward.timeout`` and then end the run; or after
        ``patience`` exclude the trajectory, or end the run. ``try`` does not wait for a judge.
        """
        patience: float = Field(60.0, gt=0)
        """Seconds that ``exclude`` and ``stop`` wait for a verdict; at most nine tenths of
        ``reward.timeout``.
        """
        max_excluded_fraction: float = Field(0.1, ge=0, le=1)
        """The share of the last ``window`` trajectories that may be excluded; the run ends beyond
        it.
        """
        window: int = Field(256, ge=1)
        """The number of trajectories for ``max_excluded_fraction``. Raise it for large steps."""
        on_invalid: Literal["exclude", "fail"] = "exclude"
        """An answer that twice makes a judge in good health reply with something else than a
        verdict: excluded, within ``max_excluded_fraction``. ``fail`` pays it 0: only for a judge
        whose every failure you are sure is the answer's.
        """
        accept: tuple[BackendLabel, ...] = Field(("openai", "vllm"), min_length=1)
        """The judge's backends that may pay.

        ``rule`` must be named: it calls incorrect whatever no rule decides.
        """
        fingerprint: str = ""
        """The fingerprint (``judge check`` prints it) of the only judge that may pay; "" for any.

        With it a run never goes on with another model, rubric or version of the rules.
        """
        metrics_port: int = Field(0, ge=0, le=65535)
        """Port of this machine's loopback where the reward actor serves the client's Prometheus
        metrics; 0 for none.
        """
        drift_every: int = Field(0, ge=0)
        """Trajectories between two repetitions of the drift subset (judge/calibrate.py); 0 for
        none.
        """
        drift_tolerance: float = Field(0.1, ge=0, le=1)
        """The share of the subset's verdicts that may differ from those at the start before a
        warning is logged.
        """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        folder = local_path(settings.rubrics) if settings.rubrics else FOLDER
        rubrics = load_rubrics(folder)
        if settings.rubric not in rubrics:
            raise ConfigError(
                f"rubric: {settings.rubric!r} is not in {folder}, which holds {', '.join(rubrics)}"
            )
        self._rubric = rubrics[settings.rubric]
        self._excluded: deque[bool] = deque(maxlen=settings.window)
        self._known_rubrics: set[str] = set()
        """Fingerprints of judges that have the same rubric as this process."""
        self._asking = asyncio.Lock()
        self.client = JudgeClient(settings.judge, known=canary([self._rubric]))
        if settings.metrics_port:
            _serve_metrics(settings.metrics_port)
        self._drift: DriftWatch | None = None
        self._graded = 0
        self._checking: asyncio.Task[float | None] | None = None

    async def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The outcome of a trajectory.

        Raises RewardLost when the configured policy ends the run, ConfigError for a bad key file or
        another judge than configured, DataFailure for a task without question or reference, or
        whose images are no files.
        """
        answer = extract(context.texts[-1], self.settings.answer) if context.texts else None
        if answer is None:
            return Scored(0.0, {"correct": 0.0}, ("unparsable",))
        shown = images(task) if self._rubric.sees_images else ()
        return await self.grade(
            question(task),
            reference(task),
            answer,
            task.source,
            context.timeout,
            shown,
            context.trial,
        )

    async def grade(
        self,
        question: str,
        reference: str,
        answer: str,
        source: str,
        timeout: float,
        images: tuple[str, ...] = (),
        trial: bool = False,
    ) -> Outcome:
        """The outcome of one answer, within ``timeout`` seconds, for rewards that combine the verdict with more. ``images``:
        absolute paths. A ``trial`` waits for no judge. Raises RewardLost, ConfigError; after another exception it is excluded.
        """
        try:
            return await self._grade(question, reference, answer, source, timeout, images, trial)
        except RayloopError:
            raise
        except Exception as error:
            logger.warning("an answer cannot be judged", exc_info=True)
            why = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
            return self._exclude(JudgeUnscored(kind=NoVerdict.UNAVAILABLE, reason=why[:1024]))

    async def _grade(
        self,
        question: str,
        reference: str,
        answer: str,
        source: str,
        timeout: float,
        images: tuple[str, ...],
        trial: bool,
    ) -> Outcome:
        item = JudgeItem(
            question=sanitise(question, 32_768),
            reference=sanitise(reference, 8_192),
            answer=sanitise(answer, 32_768),
            rubric=self._rubric.name,
            source=sanitise(source, 128),
            images=images,
        )
        if (
            self.settings.rules_first
            and (known := decide(self._rubric, item)) is not rules.UNDECIDED
        ):
            return self._scored(float(bool(known.correct)), 0.0, f"{known.rule}: {known.reason}")

        if trial and (why := await self._absent()):
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, why)
        self._watch_drift()

        patience = timeout * _SHARE
        if trial or self.settings.on_unavailable != "wait":
            patience = min(patience, self.settings.patience)

        result = await self._ask(item, asyncio.get_running_loop().time() + patience)
        if isinstance(result, JudgeVerdict):
            changed = (
                ("judge_changed",) if result.fingerprint != self.client.fingerprints[0] else ()
            )
            return self._scored(
                result.score, float(result.decided_by == "model"), result.reason, changed
            )
        if result.kind is NoVerdict.INVALID and self.settings.on_invalid == "fail":
            return Scored(0.0, {"correct": 0.0}, ("judge_invalid",))
        if trial or result.kind is NoVerdict.INVALID or self.settings.on_unavailable == "exclude":
            return self._exclude(result)
        policy = self.settings.on_unavailable
        raise RewardLost(
            f"the judge gave no verdict (on_unavailable: {policy}, {patience:.0f} s):"
            f" {result.reason}"
        )

    async def _absent(self) -> str:
        """Why no judge answers, and how one is started; "" when one says what it is."""
        try:
            async with asyncio.timeout(_THERE):
                await self.client.version()
        except (InfrastructureFailure, TimeoutError) as error:
            why = str(error) or f"{self.client.connection.url}: nothing within {_THERE:g} s"
            start = "python -m rayloop judge serve serve_apps/judge/configs/judge_openai.yaml"
            return (
                f"no judge answers ({why}). Start one first: `{start}`, or another of docs/judge.md"
            )
        return ""

    async def _ask(self, item: JudgeItem, deadline: float) -> Result:
        """Ask, and a second time when the reply is no verdict.

        The answer is the cause only while the canary is judged right.
        """
        loop = asyncio.get_running_loop()
        for _ in range(2):
            result = await self._accepted(
                await self.client.judge(item, max(deadline - loop.time(), 0.0)), deadline
            )
            if isinstance(result, JudgeVerdict) or result.kind is not NoVerdict.INVALID:
                return result
        try:
            async with asyncio.timeout_at(deadline):
                await self.client.canary.recent()
        except (InfrastructureFailure, TimeoutError) as error:
            reason = (
                f"{result.reason}; the judge is not well:"
                f" {str(error) or 'its canary took too long'}"
            )
            return JudgeUnscored(kind=NoVerdict.UNAVAILABLE, reason=reason[:1024])
        return result

    async def _accepted(self, result: Result, deadline: float) -> Result:
        """The result if its judge may pay, unscored while that is unknown.

        Raises ConfigError for another judge than configured.
        """
        if not isinstance(result, JudgeVerdict):
            return result
        pause = self.settings.judge.backoff
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._check(result)
                break
            except (InfrastructureFailure, TimeoutError) as error:
                if asyncio.get_running_loop().time() + pause > deadline:
                    why = f"the judge does not say what it is: {str(error) or 'no answer in time'}"
                    return JudgeUnscored(kind=NoVerdict.UNAVAILABLE, reason=why[:1024])
                await asyncio.sleep(pause)
                pause = min(2 * pause, self.settings.judge.backoff_max)
        if self._rubric.kind == "binary" and result.score not in (0, 1):
            return JudgeUnscored(
                kind=NoVerdict.INVALID, reason=f"the score {result.score:g} of a yes/no rubric"
            )
        return result

    async def _check(self, verdict: JudgeVerdict) -> None:
        """Raises ConfigError for a verdict of another backend, judge or rubric,
        InfrastructureFailure while the judge is silent.
        """
        url, accept, wanted = (
            self.client.connection.url,
            self.settings.accept,
            self.settings.fingerprint,
        )
        if verdict.backend not in accept:
            raise ConfigError(
                f"the judge at {url} has the backend {verdict.backend}, and this run accepts"
                f" {', '.join(accept)}. Serve one with a model, or add {verdict.backend} to accept:"
                " the backend rule calls incorrect whatever no rule decides"
            )
        if wanted and verdict.fingerprint != wanted:
            raise ConfigError(
                f"the judge at {url} is {verdict.fingerprint}, and this run accepts {wanted} only"
                " (fingerprint). `judge check` prints a judge's"
            )
        # One request for the rubrics, however many verdicts come together.
        async with self._asking:
            if verdict.fingerprint in self._known_rubrics:
                return
            name, ours = self._rubric.name, self._rubric.digest
            theirs = (await self.client.version()).rubrics.get(name, "missing")
            if theirs != ours:
                raise ConfigError(
                    f"the rubric {name} is {ours} here and {theirs} at {url}. Give both the same"
                    " files: rubrics of the reward's settings and of the judge's, and the same"
                    " version of rayloop"
                )
            self._known_rubrics.add(verdict.fingerprint)

    def _watch_drift(self) -> None:
        """Start a check of the drift in the background when one is due; one at a time."""
        due = self.settings.drift_every and self._graded % self.settings.drift_every == 0
        self._graded += 1
        if due and (self._checking is None or self._checking.done()):
            self._drift = self._drift or DriftWatch(
                self.client, self.settings.drift_tolerance, self.settings.patience
            )
            self._checking = asyncio.create_task(self._drift.check())
            self._checking.add_done_callback(_report)

    def _scored(
        self, value: float, by_model: float, reason: str, flags: tuple[str, ...] = ()
    ) -> Scored:
        self._excluded.append(False)
        return Scored(
            value, {"correct": float(value >= 0.5), "by_model": by_model}, flags, reason=reason
        )

    def _exclude(self, result: JudgeUnscored) -> Unscored:
        self._excluded.append(True)
        EXCLUDED.labels(result.kind).inc()
        # Compared with the whole window: at the start one failure would be a large share.
        if (
            count := sum(self._excluded)
        ) > self.settings.max_excluded_fraction * self.settings.window:
            raise RewardLost(
                f"{count} of the last {len(self._excluded)} trajectories have no verdict,"
                f" max_excluded_fraction {self.settings.max_excluded_fraction:g} of"
                f" {self.settings.window} is spent; {result.reason}"
            )
        return Unscored(_KINDS[result.kind], result.reason)


def _report(checking: asyncio.Task[float | None]) -> None:
    """Log the exception of a drift check, which is not awaited."""
    if not checking.cancelled() and (error := checking.exception()) is not None:
        logger.warning(
            "the judge's drift could not be checked: %s: %s", type(error).__name__, error
        )


def _serve_metrics(port: int) -> None:
    """Serve the metrics on loopback.

    The first process of a machine gets the port; the others log that they have none.
    """
    try:
        start_http_server(port, addr="127.0.0.1")
    except OSError as error:
        logger.warning("the judge client's metrics are not served on port %d: %s", port, error)


def question(task: Task) -> str:
    """The text of the task's last user message. Raises DataFailure when there is none."""
    for message in reversed(task.messages):
        if message.role == "user":
            return "\n".join(part for part in message.parts if isinstance(part, str))
    raise DataFailure(task.id, "the task has no user message, so the judge has no question")


def reference(task: Task) -> str:
    """The right answer as text. Raises DataFailure when the task has none."""
    truth = task.ground_truth
    text = (
        truth
        if isinstance(truth, str)
        else ""
        if truth is None
        else json.dumps(truth, ensure_ascii=False)
    )
    if not sanitise(text, 8_192):
        raise DataFailure(task.id, "the task has no ground truth, so the judge has no reference")
    return text.strip()


def images(task: Task) -> tuple[str, ...]:
    """Absolute paths of the task's images.

    Raises DataFailure when there are too many, or one has no file.
    """
    found = [image.path for image in task.images]
    paths = tuple(str(local_path(path)) for path in found if path is not None)
    if len(paths) < len(found) or len(found) > MAX_IMAGES:
        what = f"{len(found)} images, {len(paths)} of them with a path"
        raise DataFailure(
            task.id, f"{what}: a rubric that sees them is sent paths, of at most {MAX_IMAGES}"
        )
    return paths
