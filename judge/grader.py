"""The two ways to judge: by rules alone, or by a model that is asked only what rules cannot decide."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rayloop.core.failures import DataFailure, DeadlineExceeded
from rayloop.core.threads import in_thread
from rayloop.judge import prompt, verdict
from rayloop.judge.api import BackendLabel, JudgeItem, JudgeUnscored, JudgeVerdict, NoVerdict, Result, VerdictKind
from rayloop.judge.backend import ChatModel
from rayloop.judge.cache import VerdictCache, cache_key
from rayloop.judge.discovery import READ
from rayloop.judge.rubric import Rubric
from rayloop.judge.rules import decision as rules

logger = logging.getLogger(__name__)


def fingerprint(
    label: BackendLabel, rubrics: Mapping[str, Rubric], model: ChatModel | None = None, identity: Mapping[str, Any] = {}
) -> str:
    """Of all that a verdict depends on: backend, model and what is behind its name, sampling, rubrics, and the versions of rules,
    prompt and reading of replies."""
    code = {"rules": rules.VERSION, "prompt": prompt.VERSION, "reply": verdict.VERSION}
    about = [label, model.name, dict(model.settings), dict(identity)] if model else [label]
    parts = [*about, {name: rubric.digest for name, rubric in rubrics.items()}, code]
    return f"{label}-{hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]}"


class RuleBackend:
    """Rules alone, for machines without a model: what no rule decides is incorrect, and says so."""

    label: BackendLabel = "rule"
    model = ""

    def __init__(self, rubrics: Mapping[str, Rubric]) -> None:
        self.rubrics = rubrics
        self.fingerprint = fingerprint(self.label, rubrics)

    async def refresh(self) -> None:
        """Rules are the code, which does not change while it runs."""

    async def judge(self, items: Sequence[JudgeItem]) -> Sequence[Result]:
        return await asyncio.to_thread(lambda: [self._one(item) for item in items])

    def _one(self, item: JudgeItem) -> Result:
        try:
            decision = decide(self.rubrics[item.rubric], item)
            if decision.correct is None:
                decision = rules.Decision(False, "none", "no rule decides this; a model would have to")
            return as_verdict(decision, self.fingerprint, self.label)
        except Exception as error:  # an item never fails its batch
            return unscored(error, self.fingerprint, self.label)


class Grader:
    """Rules first, then the cache, then the model; the same question asked twice at once is asked once.

    A reply that is no verdict is UNSCORED invalid; the caller decides whether to ask again. Whatever goes wrong with an item
    is that item's result, and never its batch's.
    """

    def __init__(
        self, model: ChatModel, label: BackendLabel, rubrics: Mapping[str, Rubric], cache: VerdictCache | None = None
    ) -> None:
        self._chat, self.label, self.rubrics, self._cache = model, label, rubrics, cache
        self.model = model.name
        self.fingerprint = ""
        """"" until the model has said what it is: nothing is judged before."""
        self._asking: dict[str, asyncio.Task[Result]] = {}

    async def refresh(self) -> None:
        identity = await self._chat.identity()
        self.fingerprint = fingerprint(self.label, self.rubrics, self._chat, identity)

    async def judge(self, items: Sequence[JudgeItem]) -> Sequence[Result]:
        return await asyncio.gather(*(self._one(item) for item in items))

    async def _one(self, item: JudgeItem) -> Result:
        try:
            if not self.fingerprint:
                await self.refresh()
            return await self._judged(self.rubrics[item.rubric], item)
        except Exception as error:
            return unscored(error, self.fingerprint, self.label)

    async def _judged(self, rubric: Rubric, item: JudgeItem) -> Result:
        if item.fresh:
            return await self._ask(rubric, item)
        decision = await asyncio.to_thread(decide, rubric, item)
        if decision.correct is not None:
            return as_verdict(decision, self.fingerprint, self.label)
        key = cache_key(item, self.fingerprint)
        if self._cache is not None and (known := self._cache.get(key)) is not None:
            return known
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._remember(key, rubric, item))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(task)

    async def _remember(self, key: str, rubric: Rubric, item: JudgeItem) -> Result:
        """Outlives the request that began it: the verdict is there when the client asks again."""
        result = await self._ask(rubric, item)
        if isinstance(result, JudgeVerdict) and self._cache is not None:
            self._cache.put(key, result)
        return result

    async def _ask(self, rubric: Rubric, item: JudgeItem) -> Result:
        try:
            reply = await self._chat.reply(await _messages(rubric, item), prompt.schema(rubric))
            found = verdict.parse(reply.text, rubric.kind)
            probability = reply.probability if rubric.kind == "binary" else None
            return JudgeVerdict(
                verdict=found.verdict, score=found.score, probability=probability, reason=found.reason,
                fingerprint=self.fingerprint, backend=self.label, decided_by="model",
            )  # fmt: skip
        except Exception as error:  # here too, since this may run in a task that outlives its request
            return unscored(error, self.fingerprint, self.label)


async def _messages(rubric: Rubric, item: JudgeItem) -> Sequence[Mapping[str, Any]]:
    """Images are read in a thread: a slow file system holds up this item and no other."""
    if item.images and rubric.sees_images:
        return await in_thread(prompt.messages, rubric, item, timeout=READ)
    return prompt.messages(rubric, item)


def unscored(error: Exception, fingerprint: str, label: BackendLabel) -> JudgeUnscored:
    """Why an item has no verdict: invalid when a reply or a value cannot be read, else the judge's own failure."""
    match error:
        case DeadlineExceeded() | TimeoutError():
            kind = NoVerdict.TIMEOUT
        case verdict.InvalidVerdict() | ValidationError() | DataFailure():
            kind = NoVerdict.INVALID
        case _:
            kind = NoVerdict.UNAVAILABLE
    reason = str(error).encode(errors="backslashreplace").decode()[:1024] or type(error).__name__
    return JudgeUnscored(kind=kind, reason=reason, fingerprint=fingerprint, backend=label)


def decide(rubric: Rubric, item: JudgeItem) -> rules.Decision:
    """What rules alone say. A rule that raises has decided nothing."""
    try:
        return rules.decide(
            item.reference, item.answer, question=item.question, tolerance=rubric.tolerance_for(item.source),
            max_length=rubric.max_answer, exact=rubric.is_formula(item.source),
        )  # fmt: skip
    except Exception:
        logger.warning("a rule fails on %.200r against %.200r", item.answer, item.reference, exc_info=True)
        return rules.UNDECIDED


def as_verdict(decision: rules.Decision, fingerprint: str, label: BackendLabel) -> JudgeVerdict:
    """A decided rule's verdict."""
    kind = VerdictKind.CORRECT if decision.correct else VerdictKind.INCORRECT
    return JudgeVerdict(
        verdict=kind, score=float(bool(decision.correct)), reason=f"{decision.rule}: {decision.reason}",
        fingerprint=fingerprint, backend=label, decided_by="rules",
    )  # fmt: skip
