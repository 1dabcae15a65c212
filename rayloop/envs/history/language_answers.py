"""Earlier answers in an action language: their actions without the thought, and their summaries."""

import dataclasses

from rayloop.envs.grammar.actions import Mistake
from rayloop.envs.grammar.family import LanguageChoice
from rayloop.envs.grammar.language import spoken_format
from rayloop.envs.grammar.rules import Extent

UNIT = Extent(1000, 1000)
"""The size of the screen for which an earlier answer is written again: points stay as they are."""


class LanguageAnswers:
    """Divides answers as a language reads them."""

    def __init__(self, language: LanguageChoice) -> None:
        self._format = spoken_format(language)

    def action_and_summary(self, text: str, unread: str) -> tuple[str, str]:
        """Return the text of the action and the summary.

        ``unread`` is both, where the language cannot read ``text``.
        """
        turn = self._format.read(text, UNIT)
        if isinstance(turn, Mistake):
            return unread, unread
        if not turn.thought:
            return text, turn.summary or text
        try:
            action = self._format.write(dataclasses.replace(turn, thought=""), UNIT)
        except ValueError:
            # The language reads more than it writes.
            action = unread
        return action, turn.summary or action
