"""Chart-RVR's published prompts, from a checkout of its repository.

It has no licence, so they are not shipped.
"""

import ast
import hashlib
import warnings
from pathlib import Path

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError

REPOSITORY = "https://github.com/sanchit97/chartrl"
COMMIT = "83c4406"
FILE = "prompts.py"
NAME = "SYSTEM_PROMPT_TEMPLATES"
SHA256 = {
    1: "9907cacd5f7f7b6c28195065c2e0bb825d700bb21ce563e020b2d6266fc481f4",
    2: "5b2d7c2ebd2df4f0dac416b802d5e5a99c55295ace1d593a3ac7e6863b53ab70",
    3: "71126c7e1694af5bb483bd2e81f161cd64e50e5ce8ad6c4f24cbcf9cb7712858",
    4: "f25a391ec4e13d1f3db1160c562fbf7747bf2b1939f13dd4545df335a48a49a1",
}
"""The checksum of each template's text in UTF-8, as Python reads it."""


class Checkout(SettingsModel):
    """The published system prompt, word for word."""

    checkout: str
    """Folder of a checkout of sanchit97/chartrl, with its ``prompts.py``.

    The prompts of potate4/chartrl are the same.
    """
    number: int = Field(4, ge=1, le=4)
    """1: the answer alone, 2: with steps, 3: and the type, 4: and the table.

    The published models were trained with the last one.
    """

    def text(self) -> str:
        """The template. Raises ConfigError when it is missing, or is another one."""
        file = Path(self.checkout).expanduser() / FILE
        clone = (
            f"git clone {REPOSITORY} {self.checkout}, and git -C {self.checkout} checkout {COMMIT}"
        )
        try:
            templates = _templates(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"data.reader.with.template: no {file.absolute()} ({error.strerror}): {clone}"
            ) from error
        except (ValueError, SyntaxError) as error:
            raise ConfigError(
                f"data.reader.with.template: {file.absolute()} has no {NAME} to read: {error}."
                f" {clone}"
            ) from error
        text = templates.get(self.number)
        checksum = hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) else None
        if not isinstance(text, str) or checksum != SHA256[self.number]:
            raise ConfigError(
                f"data.reader.with.template: template {self.number} of {file.absolute()} is not the"
                f" published one: {clone}; a custom prompt goes into data.reader.with.system"
            )
        return text


def _templates(source: str) -> dict[object, object]:
    """The value of ``NAME``, a literal; nothing of the file is run.

    Raises ValueError, SyntaxError.
    """
    with warnings.catch_warnings():
        # The texts have backslashes before blanks.
        warnings.simplefilter("ignore")
        body = ast.parse(source).body
    for node in body:
        if not isinstance(node, ast.Assign):
            continue
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if NAME in names:
            value = ast.literal_eval(node.value)
            if isinstance(value, dict):
                return value
    raise ValueError(f"{NAME} is not assigned a dictionary")
