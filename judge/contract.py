"""What a run expects of the judge that pays it: the backend, the rubric's text, and perhaps one judge and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rayloop.core.failures import ConfigError
from rayloop.judge.api import BackendLabel, JudgeVerdict
from rayloop.judge.client import JudgeClient
from rayloop.judge.rubric import Rubric


class Contract:
    """Held against each verdict; the judge itself is asked once for each fingerprint. ``fingerprint`` "" is any."""

    def __init__(self, accept: Sequence[BackendLabel], fingerprint: str, rubric: Rubric) -> None:
        self._accept, self._fingerprint, self._rubric = accept, fingerprint, rubric
        self._kept: set[str] = set()
        self._asking = asyncio.Lock()

    async def hold(self, client: JudgeClient, verdict: JudgeVerdict) -> None:
        """Raises ConfigError for another judge than the configuration wants, InfrastructureFailure while it does not say."""
        url = client.transport.url
        if verdict.backend not in self._accept:
            raise ConfigError(
                f"the judge at {url} has the backend {verdict.backend}, and this run accepts {', '.join(self._accept)}. Serve one "
                f"with a model, or add {verdict.backend} to accept: the backend rule calls incorrect whatever no rule decides"
            )
        if self._fingerprint and verdict.fingerprint != self._fingerprint:
            raise ConfigError(
                f"the judge at {url} is {verdict.fingerprint}, and this run accepts {self._fingerprint} only (fingerprint). "
                "`judge check` prints a judge's"
            )
        async with self._asking:
            if verdict.fingerprint in self._kept:
                return
            name, ours = self._rubric.name, self._rubric.digest
            theirs = (await client.version()).rubrics.get(name, "missing")
            if theirs != ours:
                raise ConfigError(
                    f"the rubric {name} is {ours} here and {theirs} at {url}. Give both the same files: rubrics of the reward's "
                    "settings and of the judge's, and the same version of rayloop"
                )
            self._kept.add(verdict.fingerprint)
