"""An engine that says what a test gives it, in the renderer's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rayloop.chat.rendering import Renderer
from rayloop.core.types import Completion, FinishReason, Sampling, TokenIds, TokenPrompt, Version

Said = tuple[str, FinishReason]


class ScriptedEngine:
    """The k-th request is answered by the k-th text; ``requests`` keeps what was asked."""

    def __init__(self, renderer: Renderer, script: Sequence[Said]) -> None:
        self._renderer, self._script = renderer, list(script)
        self.requests: list[tuple[TokenPrompt, Sampling]] = []

    def tokens(self, said: Said, limit: int) -> TokenIds:
        """The text's tokens, the end token behind them when the turn ends by it, cut to ``limit``
        when by length.
        """
        text, finish = said
        ids = self._renderer.encode(text)
        if finish is FinishReason.END_TOKEN:
            return (*ids, self._renderer.end_tokens[0])
        return (ids * limit)[:limit] if finish is FinishReason.LENGTH else ids

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        said = self._script[len(self.requests)]
        self.requests.append((prompt, sampling))
        ids = self.tokens(said, sampling.max_tokens)
        return Completion(ids, (-0.5,) * len(ids), said[1], Version(0, len(self.requests)))
