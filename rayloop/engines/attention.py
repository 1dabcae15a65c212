"""Attention over packed sequences, batched by length.

A packed row then costs as much as its sequences. transformers' own SDPA masks the whole packed row,
which computes [T, T] per layer, and calls the kernel for every image and window of a vision tower.
"""

import os
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_SDPA = "packed_sdpa"

PACKED_FLEX = "packed_flex"

GROUPED_SDPA = "grouped_sdpa"

PACKED_VISION = "packed_sdpa_like_flash"
"""Name with "flash": transformers lets only such implementations keep images and windows apart."""


def flex_chosen() -> bool:
    """Whether RAYLOOP_ATTENTION=flex is set where this process runs."""
    return os.environ.get("RAYLOOP_ATTENTION") == "flex"


def use_packed(model: PreTrainedModel) -> None:
    """Let a language model with SDPA attend sample by sample, by FlexAttention if that is chosen.

    Others stay as they are. transformers makes no mask for an implementation that it does not know;
    packed attention needs none.
    """
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED_SDPA, _packed_sdpa)
        AttentionInterface.register(PACKED_FLEX, _packed_flex)
        name = PACKED_FLEX if flex_chosen() else PACKED_SDPA
        model.set_attn_implementation({"": name, "text_config": name})


def use_grouped_decoding(model: PreTrainedModel) -> None:
    """Let a language model that runs SDPA decode without copies of its cache for query heads.

    For a single new token the heads of a group equal that many queries of one head, since no mask
    depends on their order.
    """
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED_SDPA, _grouped_sdpa)
        AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
        model.set_attn_implementation({"": GROUPED_SDPA, "text_config": GROUPED_SDPA})


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether the model's attention finds the beginning that samples of a row share."""
    return bool(model.config.get_text_config()._attn_implementation in (PACKED_SDPA, PACKED_FLEX))


def attention_name(model: PreTrainedModel) -> str:
    """The name of the implementation of the language model's attention."""
    return str(model.config.get_text_config()._attn_implementation)


def packs_images(model: PreTrainedModel) -> bool:
    """Whether the model's vision tower attends by window or image."""
    return bool(model.config.vision_config._attn_implementation == PACKED_VISION)


def use_packed_vision(model: PreTrainedModel) -> None:
    """Let a vision tower that runs SDPA run it once for all windows (or images) of one size."""
    if model.config.vision_config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED_VISION, _packed_vision)
        model.set_attn_implementation({"vision_config": PACKED_VISION})


PLAIN_ATTENTION_TOKENS = 128
"""Tokens of a sequence up to which bfloat16 attention on a CPU is plain matrix products.

There SDPA takes 1.3 to 9 times as long (docs/performance.md). In float32, and for longer sequences,
SDPA is faster.
"""
SMALL_LOG2 = 6
"""Binary logarithm of the length up to which samples with a common beginning are one part.

For them padding costs less than a call.
"""


class _Sequences(NamedTuple):
    """The n sequences of a packed row.

    A sequence shares the first ``shared`` [n] of its ``lengths`` [n] tokens with the sequence
    before it, which may share them as well; the others begin at ``starts`` [n].
    """

    lengths: Tensor
    shared: Tensor
    starts: Tensor

    def paths(self) -> list[Tensor]:
        """Return the places of all tokens of each sequence, shared ones included."""
        paths: list[Tensor] = []
        path = self.starts[:0]
        for length, shared, start in zip(*(field.tolist() for field in self), strict=True):
            path = torch.cat([path[:shared], torch.arange(start, start + length - shared)])
            paths.append(path)
        return paths


class _Part(NamedTuple):
    """Sequences attended at once: places of their queries [n, Q] and keys [n, K] in the row.

    There is a mask [n, 1, Q, K] if first keys are shared.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


class _Layout(NamedTuple):
    """A packed row, cut into parts of one kind.

    ``places`` [T]: the index of each token's output in the padded outputs of all parts.
    """

    parts: list[_Part]
    places: Tensor


_layouts: MutableMapping[Tensor, _Layout] = WeakTensorKeyDictionary()
"""Layouts by the tensor that they follow from.

All layers of a model are called with that tensor, so that a layout is made once per batch.
"""


def _packed_sdpa(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    starts: Tensor | None = None,
    row: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend sample by sample.

    ``query``, ``key`` and ``value`` are [1, heads, T, d]; a sample begins where ``position_ids``
    [1, T] do not count on. One that begins at P continues the first P tokens of the sample before
    it, which may share them in the same way. Samples of similar length are padded. ``starts``: the
    same positions on the CPU. ``row``: the ``sequence.SplitRow`` of which these are a slice;
    ``starts`` are then the positions of all of it.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout = _cached_layout(position_ids if starts is None else starts, _samples, query.device)
        return _attend(module, query, key, value, layout, **options)

    if row is None:
        return attend(query, key, value), None
    return row.heads(attend, query, key, value), None


_masks: MutableMapping[Tensor, dict[int | None, BlockMask]] = WeakTensorKeyDictionary()
"""Masks, by the width of a sliding window; keyed like ``_layouts``."""


def _packed_flex(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    starts: Tensor | None = None,
    row: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as ``_packed_sdpa``, in one call.

    It needs no padding and no copies of shared keys: FlexAttention (arXiv:2412.05496),
    which torch compiles on a GPU. On a CPU it has no backward pass.
    """
    source = position_ids if starts is None else starts

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = _mask(source, options.get("sliding_window"), query.device)
        kernel = _compiled(flex_attention, query.device.type)
        output: Tensor = kernel(
            query, key, value, block_mask=mask, scale=options["scaling"], enable_gqa=True
        )
        return output.transpose(1, 2)

    if row is None:
        return attend(query, key, value), None
    return row.heads(attend, query, key, value), None


@cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    return torch.compile(function) if device == "cuda" else function


def _mask(source: Tensor, window: int | None, device: torch.device) -> BlockMask:
    """Return the mask of a row, in which a token sees the tokens before it in its sample.

    They include the tokens that the sample shares with the sample before it.
    """
    masks = _masks.setdefault(source, {})
    if window not in masks:
        positions = source[0].cpu()
        sequences = _sequences(positions)
        # Where the first sequence begins that does not continue a token.
        end = torch.full_like(positions, len(positions))
        following = zip(sequences.shared[1:], sequences.starts[1:], strict=True)
        for path, (shared, start) in zip(sequences.paths(), following, strict=False):
            end[path[shared:]] = start
        # FlexAttention compiles the rule below, which can read tensors only.
        seen_until = end.to(device)
        place = positions.to(device)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            in_sample = (key <= query) & (query < seen_until[key])
            in_window = place[query] - place[key] < (window or len(place))
            return in_sample & in_window

        make_mask = _compiled(create_block_mask, device.type)
        masks[window] = make_mask(sees, None, None, len(place), len(place), device=device)
    return masks[window]


def _grouped_sdpa(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend to a cache without a copy of it for each query head.

    ``query`` [B, heads, n, d], ``key`` and ``value`` [B, kv_heads, T, d], ``attention_mask`` [B, 1,
    n, T] or None.
    """
    batch, heads, new, width = query.shape
    # A prefill needs a causal order among its queries,
    # which heads in the place of queries would lose.
    if new > 1 or options.get("dropout"):
        result = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return cast(tuple[Tensor, None], result)
    grouped = query.view(batch, key.shape[1], -1, width)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return output.reshape(batch, 1, heads, width), None


def _packed_vision(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within windows or images, whose borders are ``cu_seq_lens_q``.

    ``query``, ``key`` and ``value`` are [1, heads, T, d].
    """
    layout = _cached_layout(cu_seq_lens_q, _images, query.device)
    return _attend(module, query, key, value, layout, **options), None


def _cached_layout(
    source: Tensor, make: Callable[[Tensor], _Layout], device: torch.device
) -> _Layout:
    """Return the layout on ``device`` that ``make`` gives for ``source``.

    A ``source`` on a GPU is waited for once.
    """
    layout = _layouts.get(source)
    if layout is None:
        on_cpu = make(source.cpu())
        parts = [_part_on(part, device) for part in on_cpu.parts]
        layout = _Layout(parts, on_cpu.places.to(device, non_blocking=True))
        _layouts[source] = layout
    return layout


def _part_on(part: _Part, device: torch.device) -> _Part:
    mask = part.mask
    return _Part(
        part.queries.to(device, non_blocking=True),
        part.keys.to(device, non_blocking=True),
        None if mask is None else mask.to(device, non_blocking=True),
    )


def _samples(position_ids: Tensor) -> _Layout:
    """Return the layout of a language model's row: one part per power of two above the length.

    Samples that share a beginning are sorted by the length after it: a long prompt would hide how
    different they are, and all would be padded to the longest.
    """
    sequences = _sequences(position_ids[0])
    size = (sequences.lengths - sequences.shared).log2().ceil()
    kinds = torch.where(sequences.shared == 0, size, -size.clamp(min=SMALL_LOG2))
    return _layout(sequences, kinds)


def _sequences(positions: Tensor) -> _Sequences:
    """Return the sequences of a row, from the ``positions`` [T] of its tokens in their samples."""
    # The first token differs from itself by 0, so that it begins a sequence as well.
    starts = (positions.diff(prepend=positions[:1]) != 1).nonzero()[:, 0]
    shared = positions[starts]
    borders = torch.cat([starts, starts.new_tensor([len(positions)])])
    lengths = shared + borders.diff()
    return _Sequences(lengths, shared, starts)


def _images(borders: Tensor) -> _Layout:
    """Return the layout of a vision tower's row: windows or images by their size."""
    lengths = borders.diff()
    starts = borders[:-1]
    return _layout(_Sequences(lengths, torch.zeros_like(lengths), starts), lengths)


def _layout(sequences: _Sequences, kinds: Tensor) -> _Layout:
    """Return a layout with one part for all sequences of each of the ``kinds`` [n]."""
    total = int((sequences.lengths - sequences.shared).sum())
    paths = sequences.paths() if sequences.shared.any() else []
    parts: list[_Part] = []
    places = torch.empty(total, dtype=torch.int64)
    padded_total = 0
    for kind in kinds.unique():
        indices = (kinds == kind).nonzero()[:, 0]
        members = _Sequences(*(field[indices] for field in sequences))
        part, real = _part(members, [paths[i] for i in indices if paths], total)
        places[part.queries.flatten()[real]] = padded_total + real
        parts.append(part)
        padded_total += part.queries.numel()
    return _Layout(parts, places)


def _part(sequences: _Sequences, paths: Sequence[Tensor], total: int) -> tuple[_Part, Tensor]:
    """Return the part of these sequences, and the indices of its queries that are not padding."""
    lengths, shared, starts = (field[:, None] for field in sequences)
    new_steps = torch.arange(int((lengths - shared).max()))
    steps = torch.arange(int(lengths.max()))
    # Padding reads any token of the row: its output is never taken.
    queries = (starts + new_steps).clamp(max=total - 1)
    real = (new_steps < lengths - shared).flatten().nonzero()[:, 0]
    # Without a mask SDPA takes its causal kernel, which
    # hides the padding behind each sequence as well.
    if not shared.any():
        return _Part(queries, queries, None), real
    keys = pad_sequence(paths, batch_first=True)
    mask = (steps <= shared[..., None] + new_steps[:, None])[:, None]
    return _Part(queries, keys, mask), real


def _attend(
    module: Module, query: Tensor, key: Tensor, value: Tensor, layout: _Layout, **options: Any
) -> Tensor:
    """Return the attention [1, T, heads, d], by one call for each part of the row.

    ``sliding_window`` of a layer: how many tokens one sees.
    """
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    on_cpu_in_bfloat16 = query.device.type == "cpu" and query.dtype == torch.bfloat16
    outputs = []
    for part in layout.parts:
        windowed = _windowed(part, options.get("sliding_window"))
        is_short = windowed.keys.shape[1] <= PLAIN_ATTENTION_TOKENS
        forward = plain_attention if on_cpu_in_bfloat16 and is_short else sdpa_attention_forward
        output, _ = forward(
            module,
            _take(queries, windowed.queries),
            _take(keys, windowed.keys),
            _take(values, windowed.keys),
            windowed.mask,
            **options,
        )
        outputs.append(output.flatten(0, 1).flatten(1))
    # Parts are padded and sorted by kind; this puts the tokens back into the row's order.
    return torch.cat(outputs).index_select(0, layout.places).view(1, *queries.shape)


def _windowed(part: _Part, window: int | None) -> _Part:
    """Return the part where a token sees ``window`` tokens, itself included; None: no limit."""
    length = part.keys.shape[1]
    if window is None or length <= window:
        return part
    causal = part.mask
    if causal is None:
        all_pairs = part.keys.new_ones(length, length, dtype=torch.bool)
        causal = all_pairs.tril()[None, None]
    first = causal.sum(-1, keepdim=True) - window
    in_window = torch.arange(length, device=causal.device) >= first
    return part._replace(mask=causal & in_window)


def plain_attention(
    module: Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return ``softmax(query keyᵀ scaling) value`` [n, L, heads, d].

    Without a ``mask`` it is causal where ``module`` or options say so.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    scores = (query * scaling) @ key.transpose(2, 3)
    if mask is None and options.get("is_causal", getattr(module, "is_causal", False)):
        mask = scores.new_ones(scores.shape[2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # The softmax is float32, like transformers' eager attention.
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2), None


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Return the ``rows`` [T, heads, d] at ``index`` [n, L] as [n, heads, L, d]."""
    taken = rows.flatten(1).index_select(0, index.flatten())
    return taken.view(*index.shape, *rows.shape[1:]).transpose(1, 2)
