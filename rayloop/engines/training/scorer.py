"""Log-probs of sampled tokens under a Hugging Face model (docs/algorithm.md, section 1).

Old, current and reference log-probs all come from here.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rayloop.core.model_families import family
from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory
from rayloop.engines.attention import attention_name, shares_prefixes, use_packed
from rayloop.engines.models import image_features, load_model
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.sequence import SequenceGroup, SplitRow
from rayloop.engines.training_settings import TILE_TOKENS, TILED_ABOVE_TOKENS
from rayloop.engines.updates import Scores
from rayloop.grpo.batch import Batch, TrainSample, by_segment
from rayloop.transports.manifest import DTYPES


class Scorer(nn.Module):
    """A language model with its head, called on packed batches.

    ``chunk``: positions whose logits exist at a time. ``learns_entropy``: the entropy has a
    gradient; otherwise it is measured only. ``together``: ranks in a row that share rows: each
    returns all log-probs, and gets the sum of all ranks' gradients of its part.
    """

    def __init__(
        self, model: Any, chunk: int, *, learns_entropy: bool = False, together: int = 1
    ) -> None:
        super().__init__()
        use_packed(model)
        for layer in model.modules():
            mlp: Any = getattr(layer, "mlp", None)
            if isinstance(layer, GradientCheckpointingLayer) and hasattr(mlp, "down_proj"):
                mlp.forward = partial(_tiled, mlp.forward)
        self.model = model
        self.head = TokenScorer(model, chunk, learns_entropy)
        self.ranks = SequenceGroup.join(together, model) if together > 1 else None

    def forward(self, batch: Batch, *, entropy: bool = False) -> Scores:
        """Return the log-probs of ``batch.targets``, and the entropy of their distributions."""
        row = self.ranks.split(batch) if self.ranks else None
        batch = row.own() if row else batch
        hidden = self.hidden(batch, row)
        # The head sees predicted positions only: logits
        # of prompts and observations would be wasted.
        hidden = hidden[batch.predict.to(hidden.device, non_blocking=True)]
        logprobs, entropies = self.head(hidden, batch, entropy)
        joined = row.joined if row else Tensor.contiguous
        return Scores(joined(logprobs), joined(entropies) if entropy else None)

    def hidden(self, batch: Batch, row: SplitRow | None = None) -> Tensor:
        """Return the last hidden states [T, H], or [t, H] of the slice of a ``row``."""
        # Text models take [1, T] ids; models with M-RoPE cut row
        # 0 of [4, 1, T] off to find where a sample begins.
        positions = batch.position_ids[0] if len(batch.position_ids) == 1 else batch.position_ids
        inputs: dict[str, Any] = self._inputs(batch, row)
        if shares_prefixes(self.model):
            inputs["starts"] = batch.starts
        if row:
            positions = positions[..., row.slice]
            inputs["row"] = row
        # Packing works only without a mask and without a cache;
        # otherwise samples silently attend to each other.
        output = self.model.base_model(
            position_ids=positions, attention_mask=None, use_cache=False, **inputs
        )
        return output.last_hidden_state[0]

    def _inputs(self, batch: Batch, row: SplitRow | None) -> dict[str, Any]:
        """Return the tokens and images of the whole row or its slice.

        An image that several samples have is encoded once.
        """
        ids = batch.token_ids[:, row.slice] if row else batch.token_ids
        if batch.pixel_values is None or batch.image_grid is None or batch.image_index is None:
            return {"input_ids": ids}
        config = self.model.config
        if not family(config.model_type).pooled:
            grids = batch.image_grid.to(batch.pixel_values.device)
            return {"input_ids": ids, "pixel_values": batch.pixel_values, "image_grid_thw": grids}
        places = batch.image_places
        if places is None:
            # The places are on the CPU: ``row`` cuts by their values, and would wait for a GPU.
            places = (batch.token_ids[0] == config.image_token_id).nonzero()[:, 0].cpu()
        encode = partial(image_features, self.model)
        encoded = row.images(encode) if row else encode(batch.pixel_values, batch.image_grid)
        embeddings = self.model.get_input_embeddings()(ids)
        # Images follow the order of the row, where one of several samples appears several times.
        images = torch.cat([encoded[i] for i in batch.image_index.tolist()]).to(embeddings.dtype)
        if row:
            borders = torch.tensor([row.slice.start, row.slice.stop])
            first, end = torch.searchsorted(places, borders).tolist()
            images = images[first:end]
            places = places[first:end] - row.slice.start
        places = places.to(ids.device, non_blocking=True)
        return {"inputs_embeds": embeddings.index_copy(1, places, images[None])}


class TokenScorer(nn.Module):
    """The head of ``Scorer``: a unit of FSDP.

    Its weights are gathered once in each pass for all chunks.
    """

    def __init__(self, model: Any, chunk: int, learns_entropy: bool) -> None:
        super().__init__()
        self.weights = model.get_output_embeddings()
        self.chunk = chunk
        self.learns_entropy = learns_entropy
        self._logits = partial(logits_of, model)

    def forward(self, hidden: Tensor, batch: Batch, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs and entropies [N] of last hidden states [N, H]."""
        # An empty batch still makes one (empty) chunk: its log-probs stay connected to the graph.
        *first_starts, last_start = range(0, max(1, len(hidden)), self.chunk)
        # Each chunk is recomputed in the backward pass, but for the last, which comes first there:
        # [N, vocabulary] is never held.
        chunks = [
            # The head draws nothing, and saving the random state would wait for the GPU.
            checkpoint(
                self._chunk,
                hidden,
                batch,
                slice(start, start + self.chunk),
                entropy,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in first_starts
        ]
        last = slice(last_start, last_start + self.chunk)
        chunks.append(self._chunk(hidden, batch, last, entropy))
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None

    def _chunk(
        self, hidden: Tensor, batch: Batch, part: slice, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        # The engine's sampler computes its log-probs in
        # float32, too; bfloat16 would widen the mismatch.
        logits = self._logits(hidden[part]).float()
        kept_tokens = None if batch.token_mask is None else batch.token_mask[part]
        logp = masked_logprobs(
            logits,
            batch.temperature[part],
            batch.ban_end[part],
            batch.banned_tokens,
            batch.end_tokens,
            kept_tokens,
        )
        target_logprobs = logp.gather(1, batch.targets[part, None])[:, 0]
        if not entropy:
            return target_logprobs, None
        # With a gradient the probabilities [chunk, V] would be kept until the backward pass.
        with torch.set_grad_enabled(self.learns_entropy and torch.is_grad_enabled()):
            return target_logprobs, -(logp.exp() * logp).sum(1)


def _tiled(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Return ``forward`` of [..., T, H], tile by tile if T is above ``TILED_ABOVE_TOKENS``."""
    if hidden.shape[-2] <= TILED_ABOVE_TOKENS:
        return forward(hidden)
    tiles = hidden.split(TILE_TOKENS, -2)
    return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], -2)


class _Hidden(tuple[Tensor]):
    """Output of a language model that has only the last hidden states [1, n, H]."""

    @property
    def last_hidden_state(self) -> Tensor:
        """The same as its first element."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        """Return None for anything else that a head may hand on."""


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits [n, V] of last hidden states [n, H].

    The model's own forward pass computes them: families scale, cap or shift them there.
    """
    language_model = model.base_model
    output = _Hidden((hidden[None],))
    language_model.forward = lambda *_, **__: output
    try:
        no_tokens = hidden.new_zeros(1, 0, dtype=torch.int64)
        logits: Tensor = model(input_ids=no_tokens, use_cache=False).logits[0]
    finally:
        del language_model.forward
    return logits


def masked_logprobs(
    logits: Tensor,
    temperature: Tensor,
    ban_end: Tensor,
    banned_tokens: Tensor,
    end_tokens: Tensor,
    token_mask: Tensor | None = None,
) -> Tensor:
    """Return the policy's log-probs [n, V] from logits [n, V] and ``temperature`` [n].

    End tokens have none where ``ban_end`` [n]. With ``token_mask`` [n, k] the distribution is over
    these tokens only, as the engine sampled them (arXiv:2512.02556); a row of -1 keeps all.
    """
    # The lowest finite number instead of -inf: the same probabilities, and p * log p stays 0
    # instead of NaN.
    lowest = torch.finfo(logits.dtype).min
    never = logits.new_zeros(logits.shape[-1]).index_fill(0, banned_tokens, lowest)
    masked = torch.addcdiv(never, logits, temperature[:, None])
    if end_tokens.numel():
        no_token = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        is_end = no_token.index_fill(0, end_tokens, True)
        masked = masked.masked_fill(ban_end[:, None] & is_end, lowest)
    if token_mask is not None:
        # scatter refuses negative indices; the rows of
        # -1, which the clamp falsifies, are exempt below.
        indices = token_mask.long().clamp(min=0)
        removed = torch.ones_like(masked, dtype=torch.bool).scatter_(1, indices, False)
        removed &= token_mask[:, :1] >= 0
        masked = masked.masked_fill_(removed, lowest)
    return masked.log_softmax(-1)


@torch.no_grad()
def score(
    scorer: nn.Module,
    samples: Sequence[TrainSample],
    plan: Sequence[Sequence[TrainSample]],
    batches: Iterable[Batch],
    *,
    entropy: bool = False,
) -> list[Scores]:
    """Return the scores [N], on the CPU, of each of ``samples``.

    ``plan`` holds each once, ``batches`` its parts; empty ones run too.
    """
    scores: dict[int, Scores] = {}
    for group, batch in zip(plan, batches, strict=True):
        output = scorer(batch, entropy=entropy)
        # An empty part only ran so that the other ranks could gather.
        if not group:
            continue
        lengths = [len(sample.predict) for sample in group]
        logprobs = output.logprobs.cpu().split(lengths)
        entropies: Sequence[Tensor | None] = [None] * len(group)
        if output.entropy is not None:
            entropies = output.entropy.cpu().split(lengths)
        for sample, sample_logprobs, sample_entropy in zip(group, logprobs, entropies, strict=True):
            scores[id(sample)] = Scores(sample_logprobs, sample_entropy)
    return [scores[id(sample)] for sample in samples]


class FrozenScorer:
    """The model as loaded, whole on one device and without gradients, for the reference actor."""

    def __init__(self, model: ModelSettings, settings: FsdpSettings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        language_model = load_model(model, dtype=DTYPES[settings.dtype])
        self._collator = Collator(language_model, model, settings, device)
        scorer = Scorer(language_model, settings.logprob_chunk).to(device)
        self._scorer = scorer.requires_grad_(False).eval()

    @property
    def attention(self) -> str:
        """The name of the language model's attention kernel."""
        return attention_name(self._scorer.model)

    def logprobs(
        self, trajectories: Sequence[Trajectory], *, swap_images: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        """Return one array [sampled_tokens] per trajectory.

        ``swap_images``: with every image replaced. Raises DataFailure and ValueError (see
        Collator.sample).
        """

        def score_segments(segments: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
            samples = [
                self._collator.sample(TrainItem(segment, 0.0), swap_images=swap_images)
                for segment in segments
            ]
            plan = self._collator.plan(samples)
            results = score(self._scorer, samples, plan, self._collator.ahead(plan))
            return [scores.logprobs.numpy() for scores in results]

        return by_segment(trajectories, score_segments)

    @torch.no_grad()
    def likeliest(self, trajectories: Sequence[Trajectory]) -> list[npt.NDArray[np.int64]]:
        """Return the likeliest token at each sampled position, [sampled_tokens] per trajectory.

        The trajectories have no restarts. Raises as ``logprobs``.
        """
        tokens = []
        for trajectory in trajectories:
            batch = self._collator.batch([self._collator.sample(TrainItem(trajectory, 0.0))])
            hidden = self._scorer.hidden(batch)
            predicting = hidden[batch.predict.to(hidden.device)]
            logprobs = masked_logprobs(
                logits_of(self._scorer.model, predicting).float(),
                batch.temperature,
                batch.ban_end,
                batch.banned_tokens,
                batch.end_tokens,
                batch.token_mask,
            )
            tokens.append(logprobs.argmax(-1).cpu().numpy())
        return tokens
