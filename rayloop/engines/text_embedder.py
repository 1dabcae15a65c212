"""A sentence embedder in the process that asks for it, such as all-MiniLM-L6-v2, for rewards
without a server. It loads torch.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from transformers import AutoModel, AutoTokenizer

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.model_files import resolve


class TextEmbedder:
    """Means of a model's last hidden states over a text's tokens, of length 1: what
    sentence-transformers computes for models with mean pooling. Longer texts are cut at the model's
    ``max_seq_length`` (MiniLM: 256 tokens).
    """

    class Settings(SettingsModel):
        model: str = "sentence-transformers/all-MiniLM-L6-v2"
        """A folder or a name of the Hub, of a model with mean pooling; change it to compare by
        another.
        """
        device: str = "cpu"
        """Where it computes. cuda needs a share of a GPU for its process
        (``reward.placement.num_gpus``).
        """
        threads: int = Field(1, ge=1)
        """Threads of torch on the CPU. Raise it where the reward is waited for."""

    def __init__(self, settings: Settings) -> None:
        folder = resolve(
            settings.model, weights=True, key="reward.source.with.embedder.with.model"
        ).folder
        if settings.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(
                f"embedder device {settings.device}: this process sees no GPU; set device: cpu, or"
                " give it a share"
            )
        if settings.device == "cpu":
            torch.set_num_threads(settings.threads)
        self._device = torch.device(settings.device)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._model = (
                AutoModel.from_pretrained(folder, dtype=torch.float32).to(self._device).eval()
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"embedder model {settings.model}: {folder} cannot be loaded: {error}"
            ) from error
        self._longest = _longest(folder, int(self._model.config.max_position_embeddings))

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """One vector of length 1 for each text; an empty text has one too, that of its two marks.

        Raises InfrastructureFailure for what torch raises, such as memory that is short: another
        grader may have it.
        """
        try:
            return self._vectors(texts)
        except (RuntimeError, MemoryError) as error:
            raise InfrastructureFailure(
                f"the embedder failed on {self._device}: {type(error).__name__}: {error}"
            ) from error

    def _vectors(self, texts: Sequence[str]) -> list[list[float]]:
        read = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self._longest,
            return_tensors="pt",
        )
        given = {name: tensor.to(self._device) for name, tensor in read.items()}
        hidden = self._model(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        # Padding has hidden states as well, so the mean counts real tokens only.
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        vectors: list[list[float]] = torch.nn.functional.normalize(mean, dim=1).cpu().tolist()
        return vectors


def _longest(folder: Path, positions: int) -> int:
    """Tokens of the longest text: sentence-transformers' own limit, else the model's positions.

    Raises ConfigError.
    """
    file = folder / "sentence_bert_config.json"
    if not file.is_file():
        return positions
    try:
        return min(
            int(json.loads(file.read_text(encoding="utf-8")).get("max_seq_length") or positions),
            positions,
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"embedder model: {file} cannot be read: {error}") from error
