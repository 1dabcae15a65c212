"""The judge as a reward source: the verdict on every trajectory, or the configured policy.

A failed judge is never a zero.
"""

import asyncio
import hashlib
import json
import logging
from collections import deque
from typing import Any, Literal

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
from rayloop.judge.conditions import conditions
from rayloop.judge.grader import decide
from rayloop.judge.prompt import sanitise
from rayloop.judge.rubric import canary, chosen_rubric
from rayloop.judge.rules import decision as rules
from rayloop.judge.rules.plain import How, extract
from rayloop.judge.transport import EXCLUDED
from rayloop.rewards.verdicts import VERDICTS

logger = logging.getLogger(__name__)

_KINDS = {
    NoVerdict.INVALID: UnscoredKind.INVALID_REWARD,
    NoVerdict.UNAVAILABLE: UnscoredKind.REWARD_UNAVAILABLE,
    NoVerdict.TIMEOUT: UnscoredKind.TIMEOUT,
}
_PATIENCE_SHARE = 0.9
"""The share of the time for scoring that may pass without a verdict."""
_TRIAL_VERSION_TIMEOUT_S = 12.0
"""Seconds in which a judge must describe itself during a dry run, whose user waits."""
_MAX_REASON = 1024


class JudgeReward:
    """The verdict's score on the answer in the last sampled turn.

    It is 0 with the flag ``unparsable`` when there is no answer. Components: ``correct`` and
    ``by_model`` (0 when a rule decided, without a request). ``judge_invalid`` flags an answer that
    made a judge in good health fail twice, ``judge_changed`` a verdict of another judge than the
    first of this process.
    """

    infrastructure = True

    class Settings(SettingsModel):
        """The judge whose verdicts are rewards, and what follows a missing verdict."""

        judge: ClientSettings = ClientSettings()
        """The judge's address, and how the client asks it."""
        rubric: str = "equivalence"
        """The name of a file in ``rubrics``.

        One with ``sees_images`` is sent the paths of the task's images.
        """
        rubrics: str = ""
        """A folder in place of judge/rubrics.

        The judge's own setting of this name must name the same files.
        """
        answer: How = "tagged_box"
        """The place of the answer in the last turn; choose the one that the prompt asks for.

        tag: the last ``<answer>...</answer>``. box: the last ``\\boxed{...}``. tagged_box: a box
        inside that answer block, or the block's text when it has no box; without a block there is
        no answer, and a bare "3" scores 0 (``unparsable``). last_line, whole: no markup is needed.
        """
        rules_first: bool = True
        """Whether rules in the run's own process decide first, and the judge is asked the rest."""
        on_unavailable: Literal["wait", "exclude", "stop"] = "wait"
        """What follows a missing verdict; ``try`` does not wait for a judge.

        wait: wait for nine tenths of ``reward.timeout``, then end the run. exclude, stop: after
        ``patience`` exclude the trajectory, or end the run.
        """
        patience: float = Field(60.0, gt=0)
        """Seconds that ``exclude`` and ``stop`` wait for a verdict.

        At most nine tenths of ``reward.timeout`` pass.
        """
        max_excluded_fraction: float = Field(0.1, ge=0, le=1)
        """The share of the last ``window`` trajectories that may be excluded.

        The run ends when more are excluded.
        """
        window: int = Field(256, ge=1)
        """The number of trajectories for ``max_excluded_fraction``. Raise it for large steps."""
        on_invalid: Literal["exclude", "fail"] = "exclude"
        """The reward of an answer that twice makes a judge in good health reply without a verdict.

        exclude: none, within ``max_excluded_fraction``. fail: 0; only for a judge whose failures
        are certainly all caused by answers.
        """
        accept: tuple[BackendLabel, ...] = Field(("openai", "vllm"), min_length=1)
        """The judge's backends whose verdicts are rewards.

        ``rule`` must be named: it calls incorrect whatever no rule decides.
        """
        fingerprint: str = ""
        """The fingerprint of the only judge whose verdicts are rewards; "" for any judge.

        ``judge check`` prints it. With it a run never continues with another model, rubric or
        version of the rules.
        """
        metrics_port: int = Field(0, ge=0, le=65535)
        """Port on loopback where the reward actor serves the client's metrics; 0 for none.

        The metrics are in Prometheus's format.
        """
        drift_every: int = Field(0, ge=0)
        """Trajectories between two checks of the drift subset (judge/calibrate.py); 0 for none."""
        drift_tolerance: float = Field(0.1, ge=0, le=1)
        """The share of the subset's verdicts that may change before a warning is logged.

        A change is a difference from the verdict at the start.
        """

    @classmethod
    def protocol_parts(cls, settings: Settings) -> dict[str, Any]:
        """What verdicts depend on besides the settings. Raises ConfigError."""
        rubric = chosen_rubric(settings.rubrics, settings.rubric)
        return {"judge": asyncio.run(conditions(settings.judge, rubric))}

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._rubric = chosen_rubric(settings.rubrics, settings.rubric)
        self._excluded: deque[bool] = deque(maxlen=settings.window)
        self._known_rubrics: set[str] = set()
        """Fingerprints of judges that have the same rubric as this process."""
        self._rubric_lock = asyncio.Lock()
        self.client = JudgeClient(settings.judge, known=canary([self._rubric]))
        if settings.metrics_port:
            _serve_metrics(settings.metrics_port)
        self._drift: DriftWatch | None = None
        self._graded = 0
        self._drift_check: asyncio.Task[float | None] | None = None

    async def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The outcome of a trajectory.

        Raises RewardLost when the configured policy ends the run, ConfigError for a bad key file or
        another judge than configured, DataFailure for a task without question or reference, or
        whose images are not files.
        """
        answer = extract(context.texts[-1], self.settings.answer) if context.texts else None
        if answer is None:
            return Scored(0.0, {"correct": 0.0}, ("unparsable",))
        return await self.grade(
            question(task),
            reference(task),
            answer,
            task.source,
            context.timeout,
            images(task) if self._rubric.sees_images else (),
            context.dry_run,
        )

    async def grade(
        self,
        question: str,
        reference: str,
        answer: str,
        source: str,
        timeout: float,
        images: tuple[str, ...] = (),
        dry_run: bool = False,
    ) -> Outcome:
        """The outcome of one answer, within ``timeout`` seconds.

        It is public for rewards that combine the verdict with others. ``images``: absolute paths. A
        ``dry_run`` waits for no judge. Raises RewardLost, ConfigError; after another exception the
        answer is excluded.
        """
        try:
            return await self._grade(question, reference, answer, source, timeout, images, dry_run)
        except RayloopError:
            raise
        except Exception as error:
            logger.warning("an answer cannot be judged", exc_info=True)
            message = f"{type(error).__name__}: {error}"
            reason = message.encode(errors="backslashreplace").decode()[:_MAX_REASON]
            return self._exclude(JudgeUnscored(kind=NoVerdict.UNAVAILABLE, reason=reason))

    async def _grade(
        self,
        question: str,
        reference: str,
        answer: str,
        source: str,
        timeout: float,
        images: tuple[str, ...],
        dry_run: bool,
    ) -> Outcome:
        item = JudgeItem(
            question=sanitise(question, 32_768),
            reference=sanitise(reference, 8_192),
            answer=sanitise(answer, 32_768),
            rubric=self._rubric.name,
            source=sanitise(source, 128),
            images=images,
        )
        if self.settings.rules_first:
            decision = decide(self._rubric, item)
            if decision is not rules.UNDECIDED:
                reason = f"{decision.rule}: {decision.reason}"
                return self._scored(float(bool(decision.correct)), 0.0, reason)

        verdicts = VERDICTS.get()
        key = _digest(item)
        if verdicts is not None and not verdicts.saves:
            saved = verdicts.saved(key)
            missing = Unscored(UnscoredKind.REWARD_UNAVAILABLE, "its verdict is not on record")
            return saved or missing
        if dry_run:
            reason = await self._absence()
            if reason:
                return Unscored(UnscoredKind.REWARD_UNAVAILABLE, reason)
        self._watch_drift()

        patience = timeout * _PATIENCE_SHARE
        if dry_run or self.settings.on_unavailable != "wait":
            patience = min(patience, self.settings.patience)
        result = await self._ask(item, asyncio.get_running_loop().time() + patience)
        outcome = self._outcome(result, dry_run, patience)
        if verdicts is not None and isinstance(outcome, Scored):
            verdicts.keep(key, outcome)
        return outcome

    def _outcome(self, result: Result, dry_run: bool, patience: float) -> Outcome:
        """The outcome of a result of the judge, by the configured policy when it has no verdict."""
        if isinstance(result, JudgeVerdict):
            is_first_judge = result.fingerprint == self.client.fingerprints[0]
            flags = () if is_first_judge else ("judge_changed",)
            by_model = float(result.decided_by == "model")
            return self._scored(result.score, by_model, result.reason, flags)

        is_invalid = result.kind is NoVerdict.INVALID
        if is_invalid and self.settings.on_invalid == "fail":
            return Scored(0.0, {"correct": 0.0}, ("judge_invalid",))
        if dry_run or is_invalid or self.settings.on_unavailable == "exclude":
            return self._exclude(result)
        policy = self.settings.on_unavailable
        raise RewardLost(
            f"the judge gave no verdict (on_unavailable: {policy}, {patience:.0f} s):"
            f" {result.reason}"
        )

    async def _absence(self) -> str:
        """Why no judge answers, and how one is started; "" when one describes itself."""
        try:
            async with asyncio.timeout(_TRIAL_VERSION_TIMEOUT_S):
                await self.client.version()
        except (InfrastructureFailure, TimeoutError) as error:
            silence = f"{self.client.connection.url}: nothing within {_TRIAL_VERSION_TIMEOUT_S:g} s"
            reason = str(error) or silence
            start = "python -m rayloop judge serve serve_apps/judge/configs/judge_openai.yaml"
            return (
                f"no judge answers ({reason}). Start one first: `{start}`, or another of"
                " docs/judge.md"
            )
        return ""

    async def _ask(self, item: JudgeItem, deadline: float) -> Result:
        """Ask, and a second time when the reply has no verdict.

        The answer is the cause only while the canary is judged right.
        """
        loop = asyncio.get_running_loop()
        for _ in range(2):
            remaining = max(deadline - loop.time(), 0.0)
            reply = await self.client.judge(item, remaining)
            result = await self._accepted(reply, deadline)
            if isinstance(result, JudgeVerdict) or result.kind is not NoVerdict.INVALID:
                return result
        try:
            async with asyncio.timeout_at(deadline):
                await self.client.canary.recent()
        except (InfrastructureFailure, TimeoutError) as error:
            problem = str(error) or "its canary took too long"
            reason = f"{result.reason}; the judge is not well: {problem}"
            return JudgeUnscored(kind=NoVerdict.UNAVAILABLE, reason=reason[:_MAX_REASON])
        return result

    async def _accepted(self, result: Result, deadline: float) -> Result:
        """The result if its judge is accepted, unscored while that is unknown.

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
                    problem = str(error) or "no answer in time"
                    reason = f"the judge does not say what it is: {problem}"
                    return JudgeUnscored(kind=NoVerdict.UNAVAILABLE, reason=reason[:_MAX_REASON])
                await asyncio.sleep(pause)
                pause = min(2 * pause, self.settings.judge.backoff_max)
        if self._rubric.kind == "binary" and result.score not in (0, 1):
            return JudgeUnscored(
                kind=NoVerdict.INVALID, reason=f"the score {result.score:g} of a yes/no rubric"
            )
        return result

    async def _check(self, verdict: JudgeVerdict) -> None:
        """Check that the verdict's judge is the configured one.

        Raises ConfigError for another backend, judge or rubric, InfrastructureFailure while the
        judge is silent.
        """
        url = self.client.connection.url
        backends = self.settings.accept
        if verdict.backend not in backends:
            raise ConfigError(
                f"the judge at {url} has the backend {verdict.backend}, and this run accepts"
                f" {', '.join(backends)}. Serve one with a model, or add {verdict.backend} to"
                " accept: the backend rule calls incorrect whatever no rule decides"
            )
        fingerprint = self.settings.fingerprint
        if fingerprint and verdict.fingerprint != fingerprint:
            raise ConfigError(
                f"the judge at {url} is {verdict.fingerprint}, and this run accepts {fingerprint}"
                " only (fingerprint). `judge check` prints a judge's"
            )
        # One request for the rubrics, however many verdicts come together.
        async with self._rubric_lock:
            if verdict.fingerprint in self._known_rubrics:
                return
            name = self._rubric.name
            digest = self._rubric.digest
            version = await self.client.version()
            judge_digest = version.rubrics.get(name, "missing")
            if judge_digest != digest:
                raise ConfigError(
                    f"the rubric {name} is {digest} here and {judge_digest} at {url}. Give both the"
                    " same files: rubrics of the reward's settings and of the judge's, and the same"
                    " version of rayloop"
                )
            self._known_rubrics.add(verdict.fingerprint)

    def _watch_drift(self) -> None:
        """Start a check of the drift in the background when one is due; one at a time."""
        is_due = self.settings.drift_every and self._graded % self.settings.drift_every == 0
        self._graded += 1
        is_checking = self._drift_check is not None and not self._drift_check.done()
        if not is_due or is_checking:
            return
        if self._drift is None:
            self._drift = DriftWatch(
                self.client, self.settings.drift_tolerance, self.settings.patience
            )
        self._drift_check = asyncio.create_task(self._drift.check())
        self._drift_check.add_done_callback(_log_failure)

    def _scored(
        self, value: float, by_model: float, reason: str, flags: tuple[str, ...] = ()
    ) -> Scored:
        self._excluded.append(False)
        components = {"correct": float(value >= 0.5), "by_model": by_model}
        return Scored(value, components, flags, reason=reason)

    def _exclude(self, result: JudgeUnscored) -> Unscored:
        self._excluded.append(True)
        EXCLUDED.labels(result.kind).inc()
        count = sum(self._excluded)
        # Compared with the whole window: at the start one failure would be a large share.
        if count > self.settings.max_excluded_fraction * self.settings.window:
            raise RewardLost(
                f"{count} of the last {len(self._excluded)} trajectories have no verdict,"
                f" max_excluded_fraction {self.settings.max_excluded_fraction:g} of"
                f" {self.settings.window} is spent; {result.reason}"
            )
        return Unscored(_KINDS[result.kind], result.reason)


def _log_failure(drift_check: asyncio.Task[float | None]) -> None:
    """Log the exception of a drift check, which is not awaited."""
    if drift_check.cancelled():
        return
    error = drift_check.exception()
    if error is not None:
        logger.warning(
            "the judge's drift could not be checked: %s: %s", type(error).__name__, error
        )


def _digest(item: JudgeItem) -> str:
    """The digest of a question to a judge, the same wherever the image files are."""
    parts = [item.rubric, item.source, item.question, item.reference, item.answer]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _serve_metrics(port: int) -> None:
    """Serve the metrics on loopback.

    The first process of a machine gets the port; the others log that they have none.
    """
    try:
        start_http_server(port, addr="127.0.0.1")
    except OSError as error:
        logger.warning("the judge client's metrics are not served on port %d: %s", port, error)


def question(task: Task) -> str:
    """The text of the task's last user message. Raises DataFailure for a task without one."""
    for message in reversed(task.messages):
        if message.role == "user":
            return "\n".join(part for part in message.parts if isinstance(part, str))
    raise DataFailure(task.id, "the task has no user message, so the judge has no question")


def reference(task: Task) -> str:
    """The right answer as text. Raises DataFailure when the task has none."""
    truth = task.ground_truth
    if truth is None:
        text = ""
    elif isinstance(truth, str):
        text = truth
    else:
        text = json.dumps(truth, ensure_ascii=False)
    if not sanitise(text, 8_192):
        raise DataFailure(task.id, "the task has no ground truth, so the judge has no reference")
    return text.strip()


def images(task: Task) -> tuple[str, ...]:
    """Absolute paths of the task's images.

    Raises DataFailure when there are too many, or one has no file.
    """
    count = len(task.images)
    paths = tuple(str(local_path(image.path)) for image in task.images if image.path is not None)
    if len(paths) < count or count > MAX_IMAGES:
        raise DataFailure(
            task.id,
            f"{count} images, {len(paths)} of them with a path: a rubric that sees them is sent"
            f" paths, of at most {MAX_IMAGES}",
        )
    return paths
