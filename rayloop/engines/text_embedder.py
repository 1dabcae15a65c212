"""A sentence embedder, such as all-MiniLM-L6-v2, in the caller's process.

It serves rewards without a server, and loads torch.
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
    """Embeds texts as means of a model's last hidden states, scaled to the length 1.

    sentence-transformers computes the same for models with mean pooling. Longer texts are cut at
    the model's ``max_seq_length`` (MiniLM: 256 tokens).
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
        key = "reward.source.with.embedder.with.model"
        folder = resolve(settings.model, weights=True, key=key).folder
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
            model = AutoModel.from_pretrained(folder, dtype=torch.float32)
            self._model = model.to(self._device).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"embedder model {settings.model}: {folder} cannot be loaded: {error}"
            ) from error
        self._longest = _longest(folder, int(self._model.config.max_position_embeddings))

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Return one vector of length 1 for each text; an empty text has that of its two marks.

        Raises InfrastructureFailure for torch's errors, such as memory that is short: another
        grader may have it.
        """
        try:
            return self._vectors(texts)
        except (RuntimeError, MemoryError) as error:
            raise InfrastructureFailure(
                f"the embedder failed on {self._device}: {type(error).__name__}: {error}"
            ) from error

    def _vectors(self, texts: Sequence[str]) -> list[list[float]]:
        encoding = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self._longest,
            return_tensors="pt",
        )
        inputs = {name: tensor.to(self._device) for name, tensor in encoding.items()}
        hidden = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        # Padding has hidden states as well, so the mean counts real tokens only.
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        vectors: list[list[float]] = torch.nn.functional.normalize(mean, dim=1).cpu().tolist()
        return vectors


def _longest(folder: Path, positions: int) -> int:
    """Return the tokens of the longest text: sentence-transformers' limit, else the positions.

    Raises ConfigError.
    """
    file = folder / "sentence_bert_config.json"
    if not file.is_file():
        return positions
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        return min(int(settings.get("max_seq_length") or positions), positions)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"embedder model: {file} cannot be read: {error}") from error
