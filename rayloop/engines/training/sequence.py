"""Sequence parallelism (Ulysses, arXiv:2309.14509): the ranks of a group hold a slice of each
packed row, and exchange it for a share of the heads where all tokens meet, in attention. Images are
shared out whole.
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
from rayloop.engines.attention import shares_prompts
from rayloop.grpo.batch import Batch

Encode = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""Pixels [P, D] and grids [n, 3] of images -> the features [tokens, H] of each."""
PREDICTED = ("targets", "temperature", "ban_end", "kept")
"""Fields of a batch for each predicted token that its log-prob needs."""


@dataclasses.dataclass(frozen=True)
class SequenceGroup:
    """The ``size`` ranks that share rows; ``rank`` is this one's place among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def join(cls, size: int, model: PreTrainedModel) -> "SequenceGroup":
        """The group of this rank: ``size`` ranks in a row.

        Collective. Raises ConfigError when the ranks or the model's key-value heads cannot be
        divided, or rows of this family cannot be cut.
        """
        text, kind = model.config.get_text_config(), family(model.config.model_type)
        # The exchange gives each rank as many whole key-value heads as the others.
        for name, number in (
            ("policy.ranks", dist.get_world_size()),
            ("the model's key-value heads", text.num_key_value_heads),
        ):
            if number % size:
                raise ConfigError(
                    f"policy.engine.sequence_parallel: {size} does not divide {name} ({number})"
                )
        if not kind.packs or (kind.images and not kind.pooled) or not shares_prompts(model):
            raise ConfigError(
                f"policy.engine.sequence_parallel: rows of {model.config.model_type} cannot be cut:"
                " that needs packed attention and images that enter with the embeddings (Qwen2-VL,"
                " Qwen2.5-VL, GLM-4V, InternVL, language models). Set it to 1"
            )
        # Ranks in a row share a node, since each layer exchanges all of its tokens between them.
        group, _ = dist.new_subgroups(size)
        return cls(group, dist.get_rank(group), size)

    def split(self, batch: Batch) -> "SplitRow":
        """The rows' slices, of lengths that differ by one token at most."""
        return SplitRow(
            self,
            batch,
            [len(part) for part in torch.arange(batch.token_ids.shape[1]).tensor_split(self.size)],
        )


class SplitRow:
    """A packed row [T] of a batch, and this rank's slice [t] of it."""

    def __init__(self, ranks: SequenceGroup, batch: Batch, sizes: Sequence[int]) -> None:
        self.ranks, self.batch, self.sizes = ranks, batch, list(sizes)
        start = sum(sizes[: ranks.rank])
        self.slice = slice(start, start + sizes[ranks.rank])
        mine = ((batch.predict >= start) & (batch.predict < self.slice.stop)).nonzero()[:, 0]
        self._predict = batch.predict[mine] - start
        self._mine = mine.to(batch.targets.device, non_blocking=True)

    def own(self) -> Batch:
        """The batch with only the tokens that this rank's slice predicts; ``predict`` counts from
        the slice's start.
        """
        fields = {
            name: None if (value := getattr(self.batch, name)) is None else value[self._mine]
            for name in PREDICTED
        }
        return dataclasses.replace(self.batch, predict=self._predict, **fields)

    def joined(self, values: Tensor) -> Tensor:
        """[N] of all predicted tokens on every rank, of ``values`` [n] of this one's.

        The gradient of each rank is added.
        """
        return self._sum(
            values.new_zeros(len(self.batch.predict)).index_copy(0, self._mine, values)
        )

    def _sum(self, tensor: Tensor) -> Tensor:
        return wait_tensor(all_reduce(tensor, "sum", self.ranks.group))

    def heads(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """``attend`` of the whole row with this rank's share of the heads, [1, t, heads, d]:
        queries, keys and values are [1, heads, t, d] here and [1, heads / ranks, T, d] there; it
        returns [1, T, heads / ranks, d].
        """
        ranks, own = self.ranks.size, [self.sizes[self.ranks.rank]] * self.ranks.size

        def whole(tensor: Tensor) -> Tensor:
            sent = tensor[0].unflatten(0, (ranks, -1)).transpose(1, 2).flatten(0, 1)
            return self._exchange(sent, own, self.sizes).transpose(0, 1)[None]

        back = self._exchange(attend(*map(whole, tensors))[0], self.sizes, own)
        return back.unflatten(0, (ranks, own[0])).transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """``rows`` [n, ...], of which each rank of the group gets as many as ``sent`` says, for
        those that it sends.
        """
        return wait_tensor(all_to_all_single(rows.contiguous(), received, sent, self.ranks.group))

    def images(self, encode: Encode) -> list[Tensor]:
        """The features of the batch's distinct images, of which each rank encodes every
        ``size``-th.
        """
        pixels, grids = self.batch.pixel_values, self.batch.image_grid
        assert pixels is not None
        assert grids is not None
        patches = grids.prod(-1).tolist()
        mine = range(self.ranks.rank, len(patches), self.ranks.size) or range(
            1
        )  # FSDP needs all ranks to run the tower
        encoded = encode(torch.cat([pixels.split(patches)[i] for i in mine]), grids[list(mine)])
        counts = [one * len(encoded[0]) // patches[mine[0]] for one in patches]
        rows = torch.arange(sum(counts), device=pixels.device).split(counts)
        whole = encoded[0].new_zeros(sum(counts), encoded[0].shape[1])

        # A rank without an image encodes the first one as well, and adds 0 times its features.
        used = 1.0 if self.ranks.rank < len(patches) else 0.0
        whole = whole.index_copy(
            0, torch.cat([rows[i] for i in mine]), used * torch.cat(list(encoded))
        )
        return list(self._sum(whole).split(counts))
