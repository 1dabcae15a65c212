"""Chart-RVR's reward: seven weighted components in one of four definitions."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Annotated, Literal, Self

import httpx
from pydantic import Field, model_validator

from rayloop.chat.tokenizer import load_tokenizer
from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.model_files import resolve
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.recipes.chart_rvr.rewards.embedders import Similarity
from rayloop.recipes.chart_rvr.rewards.original import Original
from rayloop.recipes.chart_rvr.rewards.reading import ChartSample, Count, Paid, Variant, pieces
from rayloop.recipes.chart_rvr.rewards.variants import Corrected, Paper

EMBEDDER = Role("embedder", ("embed",))
NO_EMBEDDER = (
    "the process reward (weights.process) compares texts with an embedder, and none is configured."
    " Name one, for example\n      embedder: {use:"
    " rayloop.recipes.chart_rvr.rewards.embedders:OpenAiEmbedder, with: {url:"
    " http://host:8000/v1}}\n    or rayloop.engines.text_embedder:TextEmbedder (the model in the"
    " process),\n    or rayloop.recipes.chart_rvr.rewards.embedders:WordEmbedder (counts words,"
    " needs no model), or set weights.process: 0"
)


class ChartWeights(SettingsModel):
    """Weights of the components; the reward is their weighted sum.

    The originals add them unweighted.
    """

    format: float = 1.0
    """Weight of the form that the prompt asks for: 0 or 2 (paper: 1)."""
    accuracy: float = 1.0
    """Weight of the right answer: 0 or 1 in every variant."""
    length: float = 1.0
    """Weight of reasoning that is neither short nor long: up to 2.5 (paper: 1)."""
    tags: float = 1.0
    """Weight of each tag occurring exactly once: 0 or 2; not in the paper."""
    type: float = 1.0
    """Weight of the chart's type: 0 or 1; lambda 1 in the paper's formula."""
    table: float = 1.0
    """Weight of the chart's data: up to 2.25 (paper: 2.5); also lambda 1 in the paper's formula."""
    process: float = 1.0
    """Weight of reasoning like the true one: up to 1 (paper: 2, lambda 2).

    Set 0 without an embedder.
    """


class LengthSettings(SettingsModel):
    """When reasoning is neither short nor long, for ``corrected`` and ``paper``.

    The original's numbers are fixed.
    """

    least: int = Field(50, ge=0)
    """Fewest tokens that are paid.

    The tokens of the reasoning after the table count (paper: of the whole completion).
    """
    most: int = Field(400, ge=1)
    """Most tokens that are paid; raise it for questions that need many steps.

    The paper does not print its two.
    """
    cap: int = Field(500, ge=1)
    """Reasoning of more tokens than this earns nothing for its length, steps included.

    Only for ``corrected``.
    """
    tokenizer: str = ""
    """Model folder or Hub name whose tokenizer counts.

    Empty: words, digits and signs are counted, a little less than tokens.
    """


class ChartReward:
    """``sum of weights * components``.

    Components that the variant lacks are left out, ``process`` also with weight 0. Two more
    components, ``relaxed`` and ``exact``, are the measures of the benchmarks, which are not paid.
    Flags: ``no_answer``, ``unclosed_answer``, ``unparsable_table``, ``not_a_table``,
    ``no_true_table``, ``no_reasoning``, ``no_true_reasoning``; in the originals ``stale_table``
    (compared by the sample before), ``comparison_failed`` and ``process_raised`` (the original's
    error: paid 0). The row's columns are ``label`` (the truth), ``chart_type``, ``table`` and
    ``reasoning``. With ``reward.per: group`` an original's batch is the group, and one request
    embeds all its texts.
    """

    infrastructure = (httpx.HTTPError,)

    class Settings(SettingsModel):
        variant: Literal["corrected", "original", "fork", "paper"] = "corrected"
        """corrected: the published functions with their mistakes fixed.

        original: the published functions' numbers, mistakes included, to repeat or ablate a run;
        fork: the same with the fork's table. paper: the rewards as the paper defines them, which
        the published code does not implement.
        """
        weights: ChartWeights = ChartWeights()
        tolerance: float = Field(0.05, ge=0, lt=1)
        """A number is right within this share of the true one; ``original`` always has 0.05."""
        years: tuple[int, int] = (1800, 2100)
        """Whole true numbers in this range must be met exactly: 5 % of a year is a century.

        Only for ``corrected``.
        """
        length: LengthSettings = LengthSettings()
        steps: int = Field(2, ge=1)
        """Steps that ``paper`` compares one by one, its m.

        All later ones are compared as one text.
        """
        embedder: Annotated[Component | None, EMBEDDER] = None
        """Embeds texts for the process reward: ``{use: module:Class}`` with ``embed(texts)``.

        By default no embedder is set.
        """
        batch: int = Field(256, ge=1)
        """Most texts in one call of the embedder; lower it when the server runs out of memory."""
        wait: float = Field(0.01, ge=0)
        """Seconds that a text waits for others to share a call.

        Raise it for a slow server, to ask it less often.
        """
        embed_timeout: float = Field(120.0, gt=0)
        """Seconds for one call of the embedder.

        After that the trajectories are unscored, never paid 0.
        """

        @model_validator(mode="after")
        def _embedder(self) -> Self:
            if self.weights.process and self.embedder is None:
                raise ValueError(NO_EMBEDDER)
            return self

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.variant = made(settings)
        self._weights: Mapping[str, float] = {
            name: getattr(settings.weights, name)
            for name in self.variant.components
            if name != "process"
        }
        self._similarity: Similarity | None = None
        if settings.weights.process and settings.embedder is not None:
            self._similarity = Similarity(
                settings.embedder.build(), settings.batch, settings.wait, settings.embed_timeout
            )

    def score(
        self, trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> Outcome | Awaitable[Outcome]:
        """The weighted sum.

        Raises DataFailure for a row without label or with something else than a table, and the
        embedder's errors.
        """
        sample = sampled(trajectory, task, context)
        (paid,) = self.variant.rules([sample])
        if self._similarity is None:
            return self._outcome(paid)
        return self._with_process(sample, paid)

    def score_group(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> Sequence[Outcome] | Awaitable[Sequence[Outcome]]:
        """The trajectories as one batch, in their order; raises as ``score``."""
        episodes = zip(trajectories, contexts, strict=True)
        samples = [sampled(trajectory, task, context) for trajectory, context in episodes]
        results = self.variant.rules(samples)
        if self._similarity is None:
            return list(map(self._outcome, results))
        return self._with_processes(samples, results)

    async def _with_processes(
        self, samples: Sequence[ChartSample], results: Sequence[Paid]
    ) -> Sequence[Outcome]:
        """The outcomes with the process reward.

        It is a coroutine, since ``score_group`` is called where no event loop runs.
        """
        return await asyncio.gather(*map(self._with_process, samples, results))

    async def _with_process(self, sample: ChartSample, paid: Paid) -> Outcome:
        assert self._similarity is not None
        process = self.variant.process(sample)
        value = 0.0
        if process.pairs:
            cosines = await self._similarity.cosines(process.pairs, empty=self.variant.embeds_empty)
            value = self.variant.conformity(process.pairs, cosines)
        components = {**paid.components, "process": value}
        return self._outcome(Paid(components, (*paid.flags, *process.flags)))

    def _outcome(self, paid: Paid) -> Outcome:
        value = sum(weight * paid.components[name] for name, weight in self._weights.items())
        if "process" in paid.components:
            value += self._settings.weights.process * paid.components["process"]
        return Scored(value, paid.components, paid.flags)


def made(settings: ChartReward.Settings) -> Variant:
    """The rewards of the settings' variant."""
    if settings.variant in ("original", "fork"):
        return Original(fork=settings.variant == "fork")
    length = settings.length
    count = counter(length.tokenizer)
    if settings.variant == "paper":
        return Paper(settings.tolerance, length.least, length.most, settings.steps, count)
    return Corrected(
        settings.tolerance,
        settings.years,
        length.least,
        length.most,
        length.cap,
        count,
    )


def counter(model: str) -> Count:
    """The counter of tokens: the model's tokenizer, or ``pieces`` without a model.

    Raises ConfigError.
    """
    if not model:
        return pieces
    files = resolve(model, key="reward.source.with.length.tokenizer")
    tokenizer = load_tokenizer(files.folder)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def sampled(trajectory: Trajectory, task: Task, context: ScoreContext) -> ChartSample:
    """The last turn, with the number of its tokens where they are known."""
    turns = trajectory.sampled_turns
    text = context.texts[-1] if context.texts else ""
    tokens = len(turns[-1].token_ids) if turns else None
    return ChartSample.of(text, task, tokens)
