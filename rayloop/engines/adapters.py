"""Merges adapters in peft's format into their base model."""

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

PROBE_TOKENS = 16
"""Most tokens of the forward pass that compares the merged model with the adapted one."""
MERGED_TOLERANCE = 1e-3
"""Largest difference of their logits, relative to the largest logit: float32 leaves some 1e-6."""
_SIZES = re.compile(r"size mismatch for (\S+): .*?Size\(\[([\d, ]+)\]\).*?Size\(\[([\d, ]+)\]\)")


@dataclass(frozen=True)
class MergedModel:
    """A model with its adapters merged in; ``base`` is the folder of the model without them.

    ``config``: keys of its config.json that the merged model changes.
    """

    base: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


def merge_adapters(source: Path) -> MergedModel:
    """Return the base model of the adapters in the folder ``source`` with them merged in, float32.

    Embedding and head that shared one tensor are two where the adapters made them differ. Raises
    ConfigError for adapters that do not fit their base, and where the merged model's answers differ
    from the adapted one's.
    """
    from peft import PeftConfig

    if not (source / ADAPTERS[1]).is_file():
        raise ConfigError(
            f"{source} has no {ADAPTERS[1]}. Save the adapters again with peft's save_pretrained"
        )
    try:
        settings = PeftConfig.from_pretrained(str(source))
        base = str(settings.base_model_name_or_path)
        # A folder has no revisions, and ``resolve`` refuses one for it.
        revision = None if Path(base).is_dir() else settings.revision
        model = ModelSettings(path=base, revision=revision).here(weights=True)
        base_model = load_model(model)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{source / ADAPTERS[0]}: base_model_name_or_path cannot be loaded: {error}"
        ) from error
    tied = _shared(base_model)
    adapted = _load_adapters(base_model, settings, source, base)
    logits = _logits(adapted)

    # Merging writes into the weight: a shared one would change both embedding and head.
    _untie(base_model)
    try:
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"the adapters in {source} are of a kind that is not merged: {error}"
        ) from error

    # They are tied again where the adapters touched neither,
    # so that the folder stays as small as its base.
    differ = tied and _make_one_of_equal(merged)
    _compare(logits, _logits(merged), source)
    config = {"tie_word_embeddings": False} if differ else {}
    return MergedModel(model.path, hf_state(merged), config)


def _load_adapters(base_model: PreTrainedModel, settings: Any, source: Path, base: str) -> Any:
    """Return peft's model of the base with the adapters. Raises ConfigError if they do not fit."""
    from peft import PeftModel

    try:
        adapted = PeftModel(base_model, settings)
        result = adapted.load_adapter(str(source), "default")
        # peft loads what it can and only reports the rest, which would stay random.
        mismatches = sorted((*result.missing_keys, *result.unexpected_keys))
    except (RuntimeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"the adapters in {source} do not fit {base}: {_advice(str(error))}"
        ) from error
    if mismatches:
        raise ConfigError(
            f"the adapters in {source} do not fit {base}: {len(mismatches)} tensors are missing or"
            f" unknown, first {mismatches[0]}. Name their base in {ADAPTERS[0]}"
        )
    return adapted


def _advice(error: str) -> str:
    """Return advice on an error of torch about adapters and a base of different sizes.

    Another error is returned with a general remark.
    """
    match = _SIZES.search(error)
    if match is None:
        return f"{error}. They may be for another base, or of a kind that is not merged"
    name, adapter_sizes, base_sizes = match.groups()
    sizes = (
        f"{name} has the sizes [{adapter_sizes}] in the adapters, and [{base_sizes}] in the base"
    )
    if "embed" not in name and "lm_head" not in name:
        return f"{sizes}. Name their base in {ADAPTERS[0]}"
    rows = adapter_sizes.partition(",")[0]
    return (
        f"{sizes}: the vocabulary was resized before they were trained. Resize the base in the same"
        f" way (model.resize_token_embeddings({rows}), with the tokenizer that they were trained"
        " with), save it with save_pretrained, and name that folder as base_model_name_or_path in"
        f" {ADAPTERS[0]}"
    )


def _weight_of(module: nn.Module | None) -> nn.Module | None:
    """Return the module that holds the weight below an adapter."""
    return getattr(module, "base_layer", module)


def _shared(model: PreTrainedModel) -> bool:
    """Whether head and embedding, below any adapters, are one tensor."""
    head = _weight_of(model.get_output_embeddings())
    embedding = _weight_of(model.get_input_embeddings())
    return head is not None and embedding is not None and head.weight is embedding.weight


def _untie(model: PreTrainedModel) -> None:
    """Give the head a separate weight when it shares the embedding's.

    An adapter on one of them is not on the other.
    """
    if _shared(model):
        head = _weight_of(model.get_output_embeddings())
        assert head is not None
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _make_one_of_equal(model: PreTrainedModel) -> bool:
    """Share one tensor again when head and embedding are still equal.

    Returns whether they differ.
    """
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        return False
    return True


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    """Return the logits [tokens, vocabulary] of some tokens, without dropout.

    The tokens are spread over the vocabulary; none of them stands for an image.
    """
    model.eval()
    size = model.get_input_embeddings().weight.shape[0]
    config = model.config.to_dict()
    special = {value for name, value in config.items() if name.endswith("_token_id")}
    candidates = torch.linspace(0, size - 1, PROBE_TOKENS).long().tolist()
    tokens = [token for token in candidates if token not in special]
    logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def _compare(before: Tensor, after: Tensor, source: Path) -> None:
    worst = float((after - before).abs().max())
    largest = float(before.abs().max())
    # The comparison has ``not``, so that a NaN fails it, too.
    if not worst <= MERGED_TOLERANCE * max(largest, 1.0):
        raise ConfigError(
            f"the adapters in {source} cannot be merged: the merged model's logits differ from the"
            f" adapted one's by {worst:.3g}, of {largest:.3g}. Merge them with the version of peft"
            " that trained them, and export the result"
        )
