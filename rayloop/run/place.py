"""Where a live run is: the cluster and the namespace in which others find its actors by their names, without starting anything."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rayloop.core.failures import ConfigError
from rayloop.core.files import needed, trusted, write_whole


@dataclass(frozen=True, slots=True)
class Place:
    """``address`` of Ray's head, ``token_file`` of its token ("" for none), ``namespace`` of the run's actors."""

    address: str
    token_file: str
    namespace: str


def namespace(folder: Path) -> str:
    """Ray's namespace of the run in ``folder``: the same at every start, and no other run's."""
    path = folder.resolve()
    return f"rayloop-{path.name}-{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def run_of(namespace: str) -> str:
    """The name of the run whose namespace it is; "" when it is no run's."""
    begin, _, rest = namespace.partition("-")
    return rest.rpartition("-")[0] if begin == "rayloop" else ""


@contextmanager
def findable(file: Path, address: str, namespace: str, metrics: Sequence[str] = ()) -> Iterator[None]:
    """Write this process's cluster address, readable by its owner only, until the block ends; beside it ``prometheus.json``, the
    ``metrics`` ports (host:port) for Prometheus' ``file_sd_configs``. Raises StorageFailed."""
    token = os.environ.get("RAY_AUTH_TOKEN_PATH", "") if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    place = Place(address, token, namespace)
    with needed(file):
        write_whole(file, json.dumps(asdict(place)).encode(), mode=0o600, durable=False)
        write_whole(file.with_name("prometheus.json"), json.dumps([{"targets": list(metrics)}]).encode(), durable=False)
    try:
        yield
    finally:
        for written in (file, file.with_name("prometheus.json")):
            with suppress(OSError):
                written.unlink()


def read_place(file: Path) -> Place:
    """Where the run of this file is. Raises ConfigError when it is not running, or when another user could have written that."""
    try:
        trusted(file, "the run's place")
        return Place(**json.loads(file.read_bytes()))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file.parent} is no live run: there is no {file.name}. Name the folder of a run that is running, or start one "
            f"(`python -m rayloop train`)"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
