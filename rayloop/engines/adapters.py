"""Merges adapters as peft writes them into the model that they are for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rayloop.core.failures import ConfigError
from rayloop.core.model_files import ADAPTERS
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.settings import ModelSettings

PROBE = 16
"""Tokens, at most, of the forward pass that compares the merged model with the adapted one."""
MERGED_WITHIN = 1e-3
"""Largest difference of their logits, relative to the largest logit: float32 leaves some 1e-6."""
_SIZES = re.compile(r"size mismatch for (\S+): .*?Size\(\[([\d, ]+)\]\).*?Size\(\[([\d, ]+)\]\)")


@dataclass(frozen=True, slots=True)
class MergedModel:
    """``base``: the folder of the model without adapters.

    ``config``: keys of its config.json that the merged model changes.
    """

    base: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


def merge_adapters(source: Path) -> MergedModel:
    """The base model of the adapters in the folder ``source`` with them merged in, float32.

    Embedding and head that shared one tensor are two where the adapters made them differ. Raises
    ConfigError for adapters that do not fit their base, and where the merged model answers
    otherwise than the adapted one.
    """
    from peft import PeftConfig, PeftModel

    if not (source / ADAPTERS[1]).is_file():
        raise ConfigError(
            f"{source} has no {ADAPTERS[1]}. Save the adapters again with peft's save_pretrained"
        )
    try:
        settings = PeftConfig.from_pretrained(str(source))
        base = str(settings.base_model_name_or_path)
        # A folder has no revisions, and ``resolve`` refuses one for it.
        model = ModelSettings(
            path=base, revision=None if Path(base).is_dir() else settings.revision
        ).here(weights=True)
        loaded = load_model(model)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{source / ADAPTERS[0]}: base_model_name_or_path cannot be loaded: {error}"
        ) from error
    try:
        tied = _shared(loaded)
        adapted = PeftModel(loaded, settings)
        result = adapted.load_adapter(str(source), "default")
        # peft loads what it can and only reports the rest, which would stay random.
        wrong = sorted((*result.missing_keys, *result.unexpected_keys))
    except (RuntimeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"the adapters in {source} do not fit {base}: {_advice(str(error))}"
        ) from error
    if wrong:
        raise ConfigError(
            f"the adapters in {source} do not fit {base}: {len(wrong)} tensors are missing or"
            f" unknown, first {wrong[0]}. Name their base in {ADAPTERS[0]}"
        )
    before = _logits(adapted)

    # Merging writes into the weight: a shared one would change embedding and head alike.
    _untie(loaded)
    try:
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"the adapters in {source} are of a kind that is not merged: {error}"
        ) from error

    # They are tied again where the adapters touched neither,
    # so that the folder stays as small as its base.
    differ = tied and _make_one_of_equal(merged)
    _compare(before, _logits(merged), source)
    return MergedModel(
        model.path, hf_state(merged), {"tie_word_embeddings": False} if differ else {}
    )


def _advice(error: str) -> str:
    """What to do about torch's message on adapters and a base of different sizes; another error as
    it is.
    """
    found = _SIZES.search(error)
    if found is None:
        return f"{error}. They may be for another base, or of a kind that is not merged"
    name, theirs, ours = found.groups()
    sizes = f"{name} has the sizes [{theirs}] in the adapters, and [{ours}] in the base"
    if "embed" not in name and "lm_head" not in name:
        return f"{sizes}. Name their base in {ADAPTERS[0]}"
    rows = theirs.partition(",")[0]
    return (
        f"{sizes}: the vocabulary was resized before they were trained. Resize the base in the same"
        f" way (model.resize_token_embeddings({rows}), with the tokenizer that they were trained"
        " with), save it with save_pretrained, and name that folder as base_model_name_or_path in"
        f" {ADAPTERS[0]}"
    )


def _weight_of(module: nn.Module | None) -> nn.Module | None:
    """The module that holds the weight below an adapter."""
    return getattr(module, "base_layer", module)


def _shared(model: PreTrainedModel) -> bool:
    """Whether head and embedding, below any adapters, are one tensor."""
    head, embedding = (
        _weight_of(model.get_output_embeddings()),
        _weight_of(model.get_input_embeddings()),
    )
    return head is not None and embedding is not None and head.weight is embedding.weight


def _untie(model: PreTrainedModel) -> None:
    """Give the head a weight of its own when it shares the embedding's: an adapter on one of them
    is none on the other.
    """
    if _shared(model):
        head = _weight_of(model.get_output_embeddings())
        assert head is not None
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _make_one_of_equal(model: PreTrainedModel) -> bool:
    """Share one tensor again when head and embedding are still equal.

    Returns whether they differ.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        return False
    return True


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    """[tokens, vocabulary] of some tokens spread over the vocabulary, none of which stands for an
    image; without dropout.
    """
    model.eval()
    size = model.get_input_embeddings().weight.shape[0]
    special = {
        value for name, value in model.config.to_dict().items() if name.endswith("_token_id")
    }
    tokens = [
        token
        for token in torch.linspace(0, size - 1, PROBE).long().tolist()
        if token not in special
    ]
    logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def _compare(before: Tensor, after: Tensor, source: Path) -> None:
    worst, largest = float((after - before).abs().max()), float(before.abs().max())
    # The comparison has ``not``, so that a NaN fails it, too.
    if not worst <= MERGED_WITHIN * max(largest, 1.0):
        raise ConfigError(
            f"the adapters in {source} cannot be merged: the merged model's logits differ from the"
            f" adapted one's by {worst:.3g}, of {largest:.3g}. Merge them with the version of peft"
            " that trained them, and export the result"
        )
