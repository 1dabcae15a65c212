"""Where a live run is: the cluster and the namespace of its actors.

Others find the actors there by their names, without starting anything.

A run folder may have been made by a stranger, and unpacked or copied here. A command that followed
its ``cluster.json`` would send a token to the address in it, and unpickle the answers. So commands
read this user's own copy, which the run writes where rendezvous folders are.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from rayloop.core.failures import ConfigError
from rayloop.core.files import needed, trusted, write_whole
from rayloop.launch.rendezvous import default_root

logger = logging.getLogger(__name__)

OWN = ".runs"
"""Folder next to the rendezvous folders, one file per live run.

No cluster's name begins with a dot.
"""

C = TypeVar("C", bound=BaseModel)

STARTED_IN = "started_in"
"""A file of the run folder: the folder in which the run's command was started, from which its
relative paths go.
"""
PATHS = ("model.path", "reference.path", "data.train", "data.eval")
"""Keys whose relative paths are looked for there as well."""


def started_in(run: Path) -> Path | None:
    """The folder in which the run was started; None when that is not known."""
    with suppress(OSError):
        return Path((run / STARTED_IN).read_text(encoding="utf-8"))
    return None


def from_start(config: C, run: Path) -> C:
    """A run's configuration, with absolute paths where a relative one leads nowhere from here.

    These are the paths of ``PATHS`` that exist from the folder in which the ``run`` (its folder)
    was started.
    """
    base = started_in(run)
    for key in PATHS if base else ():
        section, _, name = key.partition(".")
        part = getattr(config, section)
        typed = getattr(part, name)
        if base and typed and not Path(typed).exists() and (base / typed).exists():
            part = part.model_copy(update={name: str((base / typed).resolve())})
            config = config.model_copy(update={section: part})
    return config


@dataclass(frozen=True)
class Place:
    """The place of a live run.

    ``address`` of Ray's head, ``token_file`` of its token ("" for none), ``namespace`` of the run's
    actors.
    """

    address: str
    token_file: str
    namespace: str


def namespace(folder: Path) -> str:
    """Ray's namespace of the run in ``folder``: the same at every start, and no other run's."""
    path = folder.resolve()
    return f"rayloop-{path.name}-{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def run_of(namespace: str) -> str:
    """The name of the run whose namespace it is; "" for other namespaces."""
    begin, _, rest = namespace.partition("-")
    return rest.rpartition("-")[0] if begin == "rayloop" else ""


def own_copy(file: Path) -> Path:
    """This user's copy of the ``cluster.json`` of a run.

    Its name follows from the run's folder alone, not from the contents of the folder.
    """
    return default_root() / OWN / f"{namespace(file.parent)}.json"


@contextmanager
def findable(
    file: Path, address: str, namespace: str, metrics: Sequence[str] = ()
) -> Iterator[None]:
    """Write this process's cluster address, readable by its owner only, until the block ends.

    It goes into the run's folder, and into this user's copy. The run's folder also gets
    ``prometheus.json``, the ``metrics`` ports (host:port) for Prometheus' ``file_sd_configs``.
    Raises StorageFailed.
    """
    token = ""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        token = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    place = json.dumps(asdict(Place(address, token, namespace))).encode()

    # Not durable: a power loss ends the run, and with it what the files say.
    with needed(file):
        write_whole(file, place, mode=0o600, durable=False)
        write_whole(
            file.with_name("prometheus.json"),
            json.dumps([{"targets": list(metrics)}]).encode(),
            durable=False,
        )

    copy = own_copy(file)
    try:
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(copy, place, mode=0o600, durable=False)
    except OSError as error:  # a home that is read-only: the run itself does not need it
        logger.warning(
            "%s cannot be written (%s): logs, stacks and policy serve will not find this run",
            copy,
            error,
        )

    try:
        yield
    finally:
        for path in (file, file.with_name("prometheus.json"), copy):
            with suppress(OSError):
                path.unlink()


def read_place(file: Path) -> Place:
    """Where the run with this ``cluster.json`` is, from this user's own copy.

    Raises ConfigError when it is not running, when somebody else started it, or when another user
    could have written the copy.
    """
    copy = own_copy(file)
    try:
        # The folder as well: a user who may write into it can replace the file.
        trusted(copy.parent, "the folder of your runs' places")
        trusted(copy, "the run's place")
        return Place(**json.loads(copy.read_bytes()))
    except FileNotFoundError as error:
        if file.exists():
            raise ConfigError(
                f"{file.parent} is not a live run of yours: its {file.name} is not followed, since"
                f" {copy} does not know it. If you started it on another machine, in another"
                " container or with another RAYLOOP_RENDEZVOUS, run this command there, or set"
                " that variable"
            ) from error
        raise ConfigError(
            f"{file.parent} is not a live run: there is no {file.name}. Name the folder of a run"
            " that is running, or start one (`python -m rayloop train`)"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{copy} cannot be read: {error}") from error
