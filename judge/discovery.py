"""Discovery of the judge.

The judge writes its address to a file on a shared file system, and clients read that file.
"""

import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from rayloop.config.settings import SettingsModel, local_path
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.files import trusted, write_whole
from rayloop.core.threads import in_thread

READ_TIMEOUT_S = 30.0
"""Seconds within which a shared file system must return a file."""
_TEMPORARY_ERRORS = (
    errno.EIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.EMFILE,
    errno.ENFILE,
)
"""Errors of the file system itself: another try may work."""


def checked_url(text: str) -> str:
    """``text``, if it is ``http(s)://host[:port][/path]``. Raises ValueError for any other."""
    parts = urlsplit(text)
    is_http = parts.scheme in ("http", "https") and parts.hostname
    if not is_http or _has_blank_or_control(text):
        raise ValueError(f"{text!r} is not the address of a judge: http://host:port is expected")
    # ``port`` raises ValueError for a port beyond 65535.
    if parts.port == 0:
        raise ValueError(f"{text!r}: a port is 1 to 65535")
    return text


def _has_blank_or_control(text: str) -> bool:
    return any(character.isspace() or not character.isprintable() for character in text)


class Address(SettingsModel):
    """The judge's URL, and the file with the bearer key ("" for none); never the key itself."""

    url: str
    key_file: str = ""
    folder: str = Field("", exclude=True)
    """The folder of the file with this address.

    A key outside of it is sent only when the configuration names the key file.
    """

    @field_validator("url")
    @classmethod
    def _url(cls, text: str) -> str:
        return checked_url(text)


Find = Callable[[], Awaitable[Address]]
"""Returns the judge's present address, and is called again when requests fail.

Raises InfrastructureFailure without one.
"""


class FileDiscovery:
    """Reads the address from a JSON file that only its owner can write.

    It is for judges outside of the run's cluster.
    """

    class Settings(SettingsModel):
        """The place of the file."""

        path: str = "runs/judge.json"
        """The file that the judge writes; on a file system that both see."""

    def __init__(self, settings: Settings) -> None:
        self.path = local_path(settings.path)

    async def __call__(self) -> Address:
        """The address. Raises InfrastructureFailure without one."""
        return await in_thread(self._read, timeout=READ_TIMEOUT_S)

    def _read(self) -> Address:
        try:
            address = Address.model_validate_json(self.path.read_bytes())
            trusted(self.path, "the judge's address")
        except (OSError, ValidationError) as error:
            raise InfrastructureFailure(
                f"no judge has written its address to {self.path}: {error}"
            ) from error
        return address.model_copy(update={"folder": str(self.path.parent)})


def announce(path: Path, address: Address) -> None:
    """Write the judge's address. A reader sees the old address or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Clients do not trust a file that others can write.
    write_whole(path, address.model_dump_json().encode(), mode=0o644)


def withdraw(path: Path, address: Address) -> None:
    """Remove the file if it still has this address; the address of a later judge stays."""
    # The file may be missing, or have another content.
    with suppress(OSError, ValidationError):
        if Address.model_validate_json(path.read_bytes()) == address:
            path.unlink()


def read_key(path: str) -> str:
    """The bearer key in a file that only its owner can read; "" for no file.

    Raises ConfigError, InfrastructureFailure.
    """
    if not path:
        return ""
    file = local_path(path)
    try:
        trusted(file, "the judge's key file", 0o077)
        key = file.read_bytes().decode(errors="replace").strip()
    except OSError as error:
        failure = InfrastructureFailure if error.errno in _TEMPORARY_ERRORS else ConfigError
        raise failure(f"the judge's key file {file} cannot be read: {error}") from error
    if not key or not key.isascii() or _has_blank_or_control(key):
        raise ConfigError(
            f"the judge's key file {file} holds no key (one line of ASCII without spaces)"
        )
    return key


def key_of(address: Address, named: str) -> str:
    """The key for an address.

    It is in the file that the configuration has ``named``, otherwise in the announced file. Raises
    like ``read_key``, and ConfigError for a file outside of the announcement's folder (it may be
    another secret).
    """
    if not named and address.key_file and address.folder:
        file = local_path(address.key_file).resolve()
        folder = Path(address.folder).resolve()
        if not file.is_relative_to(folder):
            raise ConfigError(
                f"the judge's address in {folder} names the key file {file} in another folder."
                " If that is the judge's key, name it in the configuration: key_file"
            )
    return read_key(named or address.key_file)
