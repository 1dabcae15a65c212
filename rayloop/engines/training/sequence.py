"""Sequence parallelism (Ulysses, arXiv:2309.14509).

The ranks of a group hold a slice of each packed row, and exchange it for a share of the heads where
all tokens meet, in attention. Images are shared out whole.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, wait_tensor
from transformers import PreTrainedModel

from rayloop.core.failures import ConfigError
from rayloop.core.model_families import family
from rayloop.engines.attention import shares_prefixes
from rayloop.grpo.batch import Batch

Encode = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""Pixels [P, D] and grids [n, 3] of images -> the features [tokens, H] of each."""
PREDICTED = ("targets", "temperature", "ban_end", "token_mask")
"""Fields of a batch for each predicted token that its log-prob needs."""


@dataclasses.dataclass(frozen=True)
class SequenceGroup:
    """The ``size`` ranks that share rows; ``rank`` is this rank's index in the group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def join(cls, size: int, model: PreTrainedModel) -> "SequenceGroup":
        """Return the group of this rank: ``size`` ranks in a row.

        Collective. Raises ConfigError when the ranks or the model's key-value heads cannot be
        divided, or rows of this family cannot be cut.
        """
        # The exchange gives each rank as many whole key-value heads as the others.
        key_value_heads = model.config.get_text_config().num_key_value_heads
        for name, number in (
            ("policy.ranks", dist.get_world_size()),
            ("the model's key-value heads", key_value_heads),
        ):
            if number % size:
                raise ConfigError(
                    f"policy.engine.sequence_parallel: {size} does not divide {name} ({number})"
                )
        model_family = family(model.config.model_type)
        packs = model_family.packs and shares_prefixes(model)
        # Only images that enter as embeddings can be cut with the row.
        images_fit = model_family.pooled or not model_family.images
        if not (packs and images_fit):
            raise ConfigError(
                f"policy.engine.sequence_parallel: rows of {model.config.model_type} cannot be cut:"
                " that needs packed attention and images that enter with the embeddings (Qwen2-VL,"
                " Qwen2.5-VL, GLM-4V, InternVL, language models). Set it to 1"
            )
        # Ranks in a row share a node, since each layer exchanges all of its tokens between them.
        group, _ = dist.new_subgroups(size)
        return cls(group, dist.get_rank(group), size)

    def split(self, batch: Batch) -> "SplitRow":
        """Return the row's slices, of lengths that differ by one token at most."""
        tokens = torch.arange(batch.token_ids.shape[1])
        return SplitRow(self, batch, [len(part) for part in tokens.tensor_split(self.size)])


class SplitRow:
    """A packed row [T] of a batch, and this rank's slice [t] of it."""

    def __init__(self, ranks: SequenceGroup, batch: Batch, sizes: Sequence[int]) -> None:
        self.ranks = ranks
        self.batch = batch
        self.sizes = list(sizes)
        start = sum(sizes[: ranks.rank])
        self.slice = slice(start, start + sizes[ranks.rank])
        in_slice = (batch.predict >= start) & (batch.predict < self.slice.stop)
        indices = in_slice.nonzero()[:, 0]
        self._predict = batch.predict[indices] - start
        self._indices = indices.to(batch.targets.device, non_blocking=True)

    def own(self) -> Batch:
        """Return the batch with only the tokens that this rank's slice predicts.

        ``predict`` counts from the slice's start.
        """
        fields: dict[str, Tensor | None] = {}
        for name in PREDICTED:
            value: Tensor | None = getattr(self.batch, name)
            fields[name] = None if value is None else value[self._indices]
        return dataclasses.replace(self.batch, predict=self._predict, **fields)

    def joined(self, values: Tensor) -> Tensor:
        """Return the values [N] of all predicted tokens, from this rank's ``values`` [n].

        All ranks get them. The gradient of each rank is added.
        """
        spread = values.new_zeros(len(self.batch.predict)).index_copy(0, self._indices, values)
        return self._sum(spread)

    def _sum(self, tensor: Tensor) -> Tensor:
        return wait_tensor(all_reduce(tensor, "sum", self.ranks.group))

    def heads(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Call ``attend`` for the whole row with this rank's share of the heads.

        Queries, keys and values are [1, heads, t, d] here and [1, heads / ranks, T, d] in
        ``attend``, which returns [1, T, heads / ranks, d]. Returns [1, t, heads, d].
        """
        ranks = self.ranks.size
        slice_size = self.sizes[self.ranks.rank]
        slice_sizes = [slice_size] * ranks

        def whole(tensor: Tensor) -> Tensor:
            rows = tensor[0].unflatten(0, (ranks, -1)).transpose(1, 2).flatten(0, 1)
            return self._exchange(rows, slice_sizes, self.sizes).transpose(0, 1)[None]

        output = attend(*map(whole, tensors))[0]
        rows = self._exchange(output, self.sizes, slice_sizes)
        return rows.unflatten(0, (ranks, slice_size)).transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Exchange ``rows`` [n, ...] within the group.

        ``sent`` and ``received``: how many rows go to, and come from, each rank.
        """
        return wait_tensor(all_to_all_single(rows.contiguous(), received, sent, self.ranks.group))

    def images(self, encode: Encode) -> list[Tensor]:
        """Return the features of the batch's distinct images.

        Each rank encodes every ``size``-th.
        """
        pixels = self.batch.pixel_values
        grids = self.batch.image_grid
        assert pixels is not None
        assert grids is not None
        patches = grids.prod(-1).tolist()
        # FSDP needs all ranks to run the tower: a rank without an image encodes the first one.
        indices = range(self.ranks.rank, len(patches), self.ranks.size) or range(1)
        pixels_of_images = pixels.split(patches)
        image_pixels = torch.cat([pixels_of_images[i] for i in indices])
        encoded = encode(image_pixels, grids[list(indices)])

        first_patches = patches[indices[0]]
        counts = [count * len(encoded[0]) // first_patches for count in patches]
        rows = torch.arange(sum(counts), device=pixels.device).split(counts)
        features = encoded[0].new_zeros(sum(counts), encoded[0].shape[1])

        # A rank without an image adds 0 times the features of the first one.
        weight = 1.0 if self.ranks.rank < len(patches) else 0.0
        own_rows = torch.cat([rows[i] for i in indices])
        features = features.index_copy(0, own_rows, weight * torch.cat(list(encoded)))
        return list(self._sum(features).split(counts))
