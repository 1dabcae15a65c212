"""The judge itself: rules first, then the cache, then a model, if there is one."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from rayloop.core.failures import DataFailure, DeadlineExceeded
from rayloop.core.threads import in_thread
from rayloop.judge import prompt
from rayloop.judge.api import (
    BackendLabel,
    JudgeItem,
    JudgeUnscored,
    JudgeVerdict,
    NoVerdict,
    Result,
    VerdictKind,
)
from rayloop.judge.cache import VerdictCache, cache_key
from rayloop.judge.discovery import READ_TIMEOUT_S
from rayloop.judge.rubric import Rubric
from rayloop.judge.rules import decision as rules

logger = logging.getLogger(__name__)
NO_RULE = rules.Decision(False, "none", "no rule decides this; a model would have to")
_DIGEST_CHARACTERS = 16
_MAX_REASON = 1024


@dataclass(frozen=True)
class Reply:
    """A model's whole reply.

    ``probability`` is P(correct) at the verdict's token, None from an engine without log-probs.
    """

    text: str
    probability: float | None = None


class ChatModel(Protocol):
    """A model that gives verdicts. ``name`` and ``settings`` are part of the fingerprint."""

    name: str
    settings: Mapping[str, Any]

    async def identity(self) -> Mapping[str, Any]:
        """A description of the model that now has the name.

        Raises InfrastructureFailure when it does not answer.
        """

    async def reply(
        self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]
    ) -> Reply:
        """The reply to chat messages (OpenAI's form), constrained to the JSON schema.

        Raises InfrastructureFailure when the engine fails, DeadlineExceeded when it takes too long,
        and DataFailure when it refuses the messages (too long, a broken image).
        """


def fingerprint(
    label: BackendLabel,
    rubrics: Mapping[str, Rubric],
    model: ChatModel | None = None,
    identity: Mapping[str, Any] = {},
) -> str:
    """The digest of everything that decides a verdict.

    Backend, model, sampling, identity and rubrics; versions of rules, prompt and parser.
    """
    parts: list[Any] = [label]
    if model:
        parts += [model.name, dict(model.settings), dict(identity)]
    parts.append({name: rubric.digest for name, rubric in rubrics.items()})
    parts.append(
        {
            "rules": rules.RULES_VERSION,
            "prompt": prompt.PROMPT_VERSION,
            "reply": prompt.REPLY_VERSION,
        }
    )
    canonical = json.dumps(parts, sort_keys=True, default=str).encode()
    return f"{label}-{hashlib.sha256(canonical).hexdigest()[:_DIGEST_CHARACTERS]}"


class Grader:
    """Judges items by rules, and the items that no rule decides by ``model``.

    Without a model the items that no rule decides are incorrect, with that reason. The cache is
    asked before the model; equal questions at the same time reach the model once. An item that
    fails is unscored, and does not affect the other items of its batch. A reply without a verdict
    is unscored as ``invalid``.
    """

    def __init__(
        self,
        rubrics: Mapping[str, Rubric],
        model: ChatModel | None = None,
        label: BackendLabel = "rule",
        cache: VerdictCache | None = None,
    ) -> None:
        self.rubrics = rubrics
        self.chat = model
        self.label = label
        self._cache = cache
        self.model = model.name if model else ""
        self.fingerprint = "" if model else fingerprint(label, rubrics)
        """Empty until the model has answered ``identity``: nothing is judged before."""
        self._questions: dict[str, asyncio.Task[Result]] = {}

    async def refresh(self) -> None:
        """Ask the model again for its identity, which may change.

        Raises InfrastructureFailure when it does not answer.
        """
        if self.chat:
            identity = await self.chat.identity()
            self.fingerprint = fingerprint(self.label, self.rubrics, self.chat, identity)

    async def judge(self, items: Sequence[JudgeItem]) -> Sequence[Result]:
        """One result for each item, in order. Their rubrics must exist."""
        return await asyncio.gather(*map(self._judge_or_unscored, items))

    async def _judge_or_unscored(self, item: JudgeItem) -> Result:
        try:
            if not self.fingerprint:
                await self.refresh()
            return await self._judge(self.rubrics[item.rubric], item)
        except Exception as error:
            return self._unscored(error)

    async def _judge(self, rubric: Rubric, item: JudgeItem) -> Result:
        if self.chat and item.fresh:
            return await self._ask(self.chat, rubric, item)
        decision = await asyncio.to_thread(decide, rubric, item)
        if decision.correct is not None:
            return self._verdict_by_rule(decision)
        if not self.chat:
            return self._verdict_by_rule(NO_RULE)

        key = cache_key(item, self.fingerprint)
        verdict = None if self._cache is None else self._cache.get(key)
        if verdict is not None:
            return verdict
        task = self._questions.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(self.chat, rubric, item, key))
            self._questions[key] = task
            task.add_done_callback(lambda _: self._questions.pop(key, None))
        # A client that disconnects cancels its request, not the question that others may share.
        return await asyncio.shield(task)

    async def _ask(
        self, model: ChatModel, rubric: Rubric, item: JudgeItem, key: str = ""
    ) -> Result:
        """Ask the model.

        With ``key`` this runs in a task that outlives the request: the cache has the verdict when
        the client asks again.
        """
        try:
            verdict = await self._model_verdict(model, rubric, item)
            if key and self._cache is not None:
                self._cache.put(key, verdict)
            return verdict
        # Here too, since no caller may be left that awaits this task.
        except Exception as error:
            return self._unscored(error)

    async def _model_verdict(
        self, model: ChatModel, rubric: Rubric, item: JudgeItem
    ) -> JudgeVerdict:
        if item.images and rubric.sees_images:
            # In a thread: a slow file system delays this item alone.
            messages = await in_thread(prompt.messages, rubric, item, timeout=READ_TIMEOUT_S)
        else:
            messages = prompt.messages(rubric, item)
        reply = await model.reply(messages, prompt.schema(rubric))
        judgement = prompt.parse(reply.text, rubric.kind)
        return JudgeVerdict(
            verdict=judgement.verdict,
            score=judgement.score,
            probability=reply.probability if rubric.kind == "binary" else None,
            reason=judgement.reason,
            fingerprint=self.fingerprint,
            backend=self.label,
            decided_by="model",
        )

    def _verdict_by_rule(self, decision: rules.Decision) -> JudgeVerdict:
        kind = VerdictKind.CORRECT if decision.correct else VerdictKind.INCORRECT
        return JudgeVerdict(
            verdict=kind,
            score=float(bool(decision.correct)),
            reason=f"{decision.rule}: {decision.reason}",
            fingerprint=self.fingerprint,
            backend=self.label,
            decided_by="rules",
        )

    def _unscored(self, error: Exception) -> JudgeUnscored:
        """The reason why an item has no verdict.

        It is ``invalid`` when a reply or a value cannot be read, otherwise the judge's own failure.
        """
        match error:
            case DeadlineExceeded() | TimeoutError():
                kind = NoVerdict.TIMEOUT
            case prompt.InvalidVerdict() | ValidationError() | DataFailure():
                kind = NoVerdict.INVALID
            case _:
                kind = NoVerdict.UNAVAILABLE
        message = str(error).encode(errors="backslashreplace").decode()[:_MAX_REASON]
        return JudgeUnscored(
            kind=kind,
            reason=message or type(error).__name__,
            fingerprint=self.fingerprint,
            backend=self.label,
        )


def decide(rubric: Rubric, item: JudgeItem) -> rules.Decision:
    """The rules' decision on an item. A rule that raises is logged, and decides nothing."""
    try:
        return rules.decide(
            item.reference,
            item.answer,
            question=item.question,
            tolerance=rubric.tolerance_for(item.source),
            max_length=rubric.max_answer,
            exact=rubric.is_formula(item.source),
        )
    except Exception:
        logger.warning(
            "a rule fails on %.200r against %.200r", item.answer, item.reference, exc_info=True
        )
        return rules.UNDECIDED
