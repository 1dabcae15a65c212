"""Attention over packed sequences, batched by length: packing then costs what the sequences cost.
transformers' own SDPA masks the whole packed row, which computes [T, T] per layer, and calls the
kernel for every image and window of a vision tower.
"""

import os
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_SDPA = "packed_sdpa"

PACKED_FLEX = "packed_flex"

GROUPED_SDPA = "grouped_sdpa"

PACKED_VISION = "packed_sdpa_like_flash"
"""transformers leaves it to implementations with "flash" in their name to keep images and windows
apart.
"""


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
    """Let a language model that runs SDPA decode without a copy of its cache for every query head
    of a group. Of a single new token the heads of a group are as good as that many queries of one
    head, since no order among them is masked.
    """
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED_SDPA, _grouped_sdpa)
        AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
        model.set_attn_implementation({"": GROUPED_SDPA, "text_config": GROUPED_SDPA})


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether the model's attention finds the prompt that several samples of a row have in common."""
    return bool(model.config.get_text_config()._attn_implementation in (PACKED_SDPA, PACKED_FLEX))


def packs_images(model: PreTrainedModel) -> bool:
    """Whether the model's vision tower attends by window or image."""
    return bool(model.config.vision_config._attn_implementation == PACKED_VISION)


def use_packed_vision(model: PreTrainedModel) -> None:
    """Let a vision tower that runs SDPA run it once for all windows (or images) of one size."""
    if model.config.vision_config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED_VISION, _packed_vision)
        model.set_attn_implementation({"vision_config": PACKED_VISION})


PLAIN_UP_TO = 128
"""Tokens of a sequence up to which bfloat16 attention on a CPU is plain matrix products: there SDPA
takes 1.3 to 9 times as long (docs/performance.md). In float32, and for longer sequences, SDPA is
faster.
"""
SMALL = 6
"""Binary logarithm of the length up to which samples with a common prompt are one part: padding
costs less than a call.
"""


class _Sequences(NamedTuple):
    """The sequences of a packed row [n].

    The ``shared`` first tokens of one lie at ``roots``, the others at ``starts``.
    """

    lengths: Tensor
    shared: Tensor
    roots: Tensor
    starts: Tensor


class _Part(NamedTuple):
    """Sequences attended at once: rows of queries [n, Q] and keys [n, K]; a mask [n, 1, Q, K] if
    first keys are shared.
    """

    own: Tensor
    seen: Tensor
    mask: Tensor | None


class _Layout(NamedTuple):
    """A packed row, cut into parts of one kind.

    ``places`` [T]: where each token's output is among those of all parts, padded.
    """

    parts: list[_Part]
    places: Tensor


_layouts: MutableMapping[Tensor, _Layout] = WeakTensorKeyDictionary()
"""By the tensor that a layout follows from, which all layers of a model are called with: it is made
once per batch.
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
    """``query``, ``key`` and ``value`` are [1, heads, T, d]; a sample begins where ``position_ids``
    [1, T] are 0. What begins at P > 0 continues the first P tokens of the last sample that began at
    0. Samples of similar length are padded. ``starts``: the same positions on the CPU. ``row``: the
    ``sequence.SplitRow`` of which these are a slice; ``starts`` are then those of all of it.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout = _remembered(position_ids if starts is None else starts, _samples, query.device)
        return _attend(module, query, key, value, layout, **options)

    return (
        attend(query, key, value) if row is None else row.heads(attend, query, key, value)
    ), None


_masks: MutableMapping[Tensor, dict[int | None, BlockMask]] = WeakTensorKeyDictionary()
"""As ``_layouts``, by the width of a sliding window."""


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
    """As ``_packed_sdpa``, in one call without padding or copies of a shared prompt's keys:
    FlexAttention (arXiv:2412.05496), which torch compiles on a GPU. On a CPU it has no backward
    pass.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = _mask(
            position_ids if starts is None else starts, options.get("sliding_window"), query.device
        )
        kernel = _compiled(flex_attention, query.device.type)
        return cast(
            Tensor,
            kernel(query, key, value, block_mask=mask, scale=options["scaling"], enable_gqa=True),
        ).transpose(1, 2)

    return (
        attend(query, key, value) if row is None else row.heads(attend, query, key, value)
    ), None


@cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    return torch.compile(function) if device == "cuda" else function


def _mask(source: Tensor, window: int | None, device: torch.device) -> BlockMask:
    """Which tokens of a row each token sees: those before it in its sample, the prompt that the
    sample continues among them.
    """
    masks = _masks.setdefault(source, {})
    if window not in masks:
        positions = source[0].cpu()
        sequences = _sequences(positions)
        of = torch.arange(len(sequences.starts)).repeat_interleave(
            sequences.lengths - sequences.shared
        )
        # FlexAttention compiles the rule below, which can read tensors only.
        start, root, shared = (
            field[of].to(device) for field in (sequences.starts, sequences.roots, sequences.shared)
        )
        place = positions.to(device)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (key >= start[query]) & (key <= query)
            prompt = (key >= root[query]) & (key < root[query] + shared[query])
            return (own | prompt) & (place[query] - place[key] < (window or len(place)))

        masks[window] = _compiled(create_block_mask, device.type)(
            sees, None, None, len(place), len(place), device=device
        )
    return masks[window]


def _grouped_sdpa(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``query`` [B, heads, n, d], ``key`` and ``value`` [B, kv_heads, T, d], ``attention_mask`` [B,
    1, n, T] or None.
    """
    batch, heads, new, width = query.shape
    # A prefill needs a causal order among its queries,
    # which heads in the place of queries would lose.
    if new > 1 or options.get("dropout"):
        return cast(
            tuple[Tensor, None],
            sdpa_attention_forward(module, query, key, value, attention_mask, **options),
        )
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
    """``query``, ``key`` and ``value`` are [1, heads, T, d]; ``cu_seq_lens_q`` are the borders of
    windows or images.
    """
    return (
        _attend(
            module, query, key, value, _remembered(cu_seq_lens_q, _images, query.device), **options
        ),
        None,
    )


def _remembered(source: Tensor, make: Callable[[Tensor], _Layout], device: torch.device) -> _Layout:
    """The layout on ``device`` that ``make`` gives for ``source``; a ``source`` on a GPU is waited
    for once.
    """
    layout = _layouts.get(source)
    if layout is None:
        parts, places = make(source.cpu())
        on = [
            _Part(
                *(None if index is None else index.to(device, non_blocking=True) for index in part)
            )
            for part in parts
        ]
        layout = _layouts[source] = _Layout(on, places.to(device, non_blocking=True))
    return layout


def _samples(position_ids: Tensor) -> _Layout:
    """Of a language model's row: samples by the power of two above their length, those that share a
    prompt by their own part of it: a long prompt would hide how different they are, and all would
    be padded to the longest.
    """
    sequences = _sequences(position_ids[0])
    size = (sequences.lengths - sequences.shared).log2().ceil()
    return _layout(sequences, torch.where(sequences.shared == 0, size, -size.clamp(min=SMALL)))


def _sequences(positions: Tensor) -> _Sequences:
    """Of a row with these ``positions`` [T] of its tokens in their samples."""
    # The first token differs from itself by 0, so that it begins a sequence as well.
    starts = (positions.diff(prepend=positions[:1]) != 1).nonzero()[:, 0]
    shared = positions[starts]
    lengths = shared + torch.cat([starts, starts.new_tensor([len(positions)])]).diff()
    # A sequence that shares a prompt follows the one
    # that has it whole: the last such start before it.
    return _Sequences(lengths, shared, torch.where(shared == 0, starts, 0).cummax(0).values, starts)


def _images(borders: Tensor) -> _Layout:
    """Of a vision tower's row: windows or images by their size."""
    lengths, starts = borders.diff(), borders[:-1]
    return _layout(_Sequences(lengths, torch.zeros_like(lengths), starts, starts), lengths)


def _layout(sequences: _Sequences, kinds: Tensor) -> _Layout:
    """One part for all sequences of one of ``kinds`` [n]."""
    total = int((sequences.lengths - sequences.shared).sum())
    parts, places, padded = [], torch.empty(total, dtype=torch.int64), 0
    for kind in kinds.unique():
        part, real = _part(_Sequences(*(field[kinds == kind] for field in sequences)), total)
        places[part.own.flatten()[real]] = padded + real
        parts.append(part)
        padded += part.own.numel()
    return _Layout(parts, places)


def _part(sequences: _Sequences, total: int) -> tuple[_Part, Tensor]:
    """The part of these sequences, and which of its queries, flattened, are no padding."""
    lengths, shared, roots, starts = (field[:, None] for field in sequences)
    ahead, steps = torch.arange(int((lengths - shared).max())), torch.arange(int(lengths.max()))
    # Padding reads any token of the row: its output is never taken.
    own = (starts + ahead).clamp(max=total - 1)
    real = (ahead < lengths - shared).flatten().nonzero()[:, 0]
    # Without a mask SDPA takes its causal kernel, which
    # hides the padding behind each sequence as well.
    if not shared.any():
        return _Part(own, own, None), real
    seen = torch.where(steps < shared, roots + steps, starts - shared + steps).clamp(max=total - 1)
    return _Part(own, seen, (steps <= shared[..., None] + ahead[:, None])[:, None]), real


def _attend(
    module: Module, query: Tensor, key: Tensor, value: Tensor, layout: _Layout, **options: Any
) -> Tensor:
    """Attention [1, T, heads, d], one call for each part of the row.

    ``sliding_window`` of a layer: how many tokens one sees.
    """
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    outputs = []
    for own, seen, mask in (
        _windowed(part, options.get("sliding_window")) for part in layout.parts
    ):
        plain = (
            query.device.type == "cpu"
            and query.dtype == torch.bfloat16
            and seen.shape[1] <= PLAIN_UP_TO
        )
        forward = plain_attention if plain else sdpa_attention_forward
        output, _ = forward(
            module, _take(queries, own), _take(keys, seen), _take(values, seen), mask, **options
        )
        outputs.append(output.flatten(0, 1).flatten(1))
    # Parts are padded and sorted by kind; this puts the tokens back into the row's order.
    return torch.cat(outputs).index_select(0, layout.places).view(1, *queries.shape)


def _windowed(part: _Part, window: int | None) -> _Part:
    """The part where a token sees ``window`` tokens, itself among them; None: all before it."""
    length = part.seen.shape[1]
    if window is None or length <= window:
        return part
    causal = (
        part.seen.new_ones(length, length, dtype=torch.bool).tril()[None, None]
        if part.mask is None
        else part.mask
    )
    first = causal.sum(-1, keepdim=True) - window
    return part._replace(mask=causal & (torch.arange(length, device=causal.device) >= first))


def plain_attention(
    module: Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """``softmax(query keyᵀ scaling) value`` [n, L, heads, d]; without a ``mask`` causal where
    ``module`` or options say so.
    """
    key, value = (
        tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)
        for tensor in (key, value)
    )
    scores = (query * scaling) @ key.transpose(2, 3)
    if mask is None and options.get("is_causal", getattr(module, "is_causal", False)):
        mask = scores.new_ones(scores.shape[2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # The softmax is float32 as in transformers' eager attention.
    return (scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).transpose(1, 2), None


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """[n, heads, L, d] of ``rows`` [T, heads, d]."""
    taken = rows.flatten(1).index_select(0, index.flatten())
    return taken.view(*index.shape, *rows.shape[1:]).transpose(1, 2)
