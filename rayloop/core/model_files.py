"""Where a model is: a local folder, or a commit of a model of the Hub; the same name may stand for
another one tomorrow.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rayloop.core.failures import ConfigError, counted

WHOLE = 2**26
"""Bytes up to which a file is hashed as a whole."""
BLOCKS, BLOCK = 16, 2**16
"""A larger one is hashed by its size and at so many places, so many bytes at each."""
HUB = 3.0
"""Seconds within which the Hub must say which commit a name stands for; it is asked once."""
HUB_NAME, COMMIT = re.compile(r"(?!.*\.\.)\w[\w.-]*/\w[\w.-]*"), re.compile(r"[0-9a-f]{40}")
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
"""The files of peft's adapters, which are no model."""
TEXTS, WEIGHTS = ("*.json", "*.jinja", "*.txt", "tokenizer.model"), "*.safetensors"
WHOLE_MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of all weights, or the one that says which file holds which."""


def hashed(files: Iterable[Path]) -> str:
    """16 hex digits over the names, sizes and contents of the files that exist, in their order."""
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with open(file, "rb") as content:
            if size <= WHOLE:
                digest.update(content.read())
                continue
            for number in range(BLOCKS):
                # The places are even from the first to the
                # last block, so that both ends are covered.
                content.seek((size - BLOCK) * number // (BLOCKS - 1))
                digest.update(content.read(BLOCK))
    return digest.hexdigest()[:16]


def header(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> sizes of the tensors of a safetensors file, from its JSON header, whose length its
    first 8 bytes hold. Raises ConfigError for another file.
    """
    try:
        with open(file, "rb") as content:
            length = int.from_bytes(content.read(8), "little")
            # In another file these eight bytes can mean an exabyte.
            found = json.loads(content.read(min(length, file.stat().st_size)))
    except ValueError as error:
        raise ConfigError(
            f"model.path: {file} is no safetensors file; is it a pointer of git-lfs (git lfs pull)?"
        ) from error
    return {
        name: tuple(tensor["shape"]) for name, tensor in found.items() if name != "__metadata__"
    }


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor of a model is, and its sizes."""

    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Resolved:
    """Where a model's files are on this machine.

    ``commit``: of a model of the Hub; None: ``folder`` is what the path names.
    """

    folder: Path
    commit: str | None = None

    def identity(self) -> dict[str, str]:
        """Of a folder the hash of its files, of a Hub's model its commit, which stands for all of
        its files.
        """
        return (
            {"commit": self.commit}
            if self.commit
            else {"files": hashed(sorted(self.folder.iterdir()))}
        )

    @property
    def weights(self) -> list[Path]:
        """The files of weights: those that the index names, else model.safetensors, else any;
        repositories may hold two sets.
        """
        whole = self.folder / WHOLE_MODEL
        found = self._named() or ([whole] if whole.is_file() else self.folder.glob(WEIGHTS))
        return sorted(file for file in found if file.is_file())

    def stored(self) -> dict[str, Stored]:
        """The model's tensors by name: those that the index names, or of ``model.safetensors``, or
        of every file; what else lies in the folder is not the model's. Empty without safetensors.
        Raises ConfigError for a tensor that is missing, or in two of the files.
        """
        places = self._index()
        found: dict[str, Stored] = {}
        for file in self.weights:
            for name, shape in header(file).items():
                # Repositories hold further files, such as a
                # second precision, that the index does not name.
                if places and name not in places:
                    continue
                if name in found:
                    raise ConfigError(
                        f"{self.folder}: {name} is in {found[name].file.name} and in {file.name};"
                        " remove one of them"
                    )
                found[name] = Stored(file, shape)
        missing = sorted(places.keys() - found.keys())
        if missing:
            where = f"{places[missing[0]].name}, as {INDEX} says"
            raise ConfigError(
                f"{self.folder} lacks {counted(len(missing), 'tensor')} of the model, first"
                f" {missing[0]} in {where}"
            )
        return found

    def refuse_two_models(self) -> None:
        """Raises ConfigError for a folder of which programs load different weights."""
        whole, named = self.folder / WHOLE_MODEL, self._named()
        if named and whole.is_file() and whole not in named:
            raise ConfigError(
                f"{self.folder} holds two models, {WHOLE_MODEL} and the files that {INDEX} names,"
                " and programs differ in which they load. Remove what is left over"
            )
        if (self.folder / ADAPTERS[0]).is_file() and (self.folder / "config.json").is_file():
            raise ConfigError(
                f"{self.folder} holds a model and peft's {ADAPTERS[0]}, which transformers would"
                " put on top. Keep adapters in a folder without a model, and merge them: python -m"
                " rayloop export ADAPTERS OUT"
            )

    @property
    def whole(self) -> bool:
        """Whether all weights are here."""
        return bool(self.weights) and all(file.is_file() for file in self._named())

    def _named(self) -> set[Path]:
        """The files that the index names; empty: there is no index."""
        return {*self._index().values()}

    def _index(self) -> dict[str, Path]:
        """The file of each tensor, as the index says; empty: there is no index.

        Raises ConfigError.
        """
        index = self.folder / INDEX
        if not index.is_file():
            return {}
        try:
            places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self.folder / file for name, file in places.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{index} is no index of weights ({type(error).__name__}: {error}). Download it"
                " again"
            ) from error


def are_adapters(folder: Path) -> bool:
    """Whether the folder holds adapters as peft writes them, without the model that they are for."""
    return (folder / ADAPTERS[0]).is_file() and not (folder / "config.json").is_file()


def resolve(
    path: str, revision: str | None = None, *, weights: bool = False, key: str = "model.path"
) -> Resolved:
    """The files of a model: a local folder, or a model of the Hub at ``revision`` (commit, tag,
    branch; None: main), downloaded if the cache lacks it. Without an answer of the Hub the cached
    commit is taken. Raises ConfigError with ``key``, the path's.
    """
    if Path(path).is_dir():
        if revision is not None:
            raise ConfigError(
                f"model.revision: {revision}: {path} is a folder, which has no revisions. Leave"
                " it out"
            )
        if are_adapters(Path(path)):
            merge = f"python -m rayloop export {path} OUT"
            raise ConfigError(
                f"{key}: {path} holds adapters without their model. Merge them: {merge}, then"
                f" {key}=OUT"
            )
        return Resolved(Path(path))
    if not HUB_NAME.fullmatch(path):
        raise ConfigError(f"{key}: {path} is no folder here, and no name on the Hub (owner/name)")
    commit, why = _commit(path, revision)
    cached = _cached(path, commit or revision)
    if cached is not None and (cached.whole or not weights):
        return cached
    if commit is None or why:
        raise ConfigError(
            f"{key}: {path} is no folder here, the cache does not have {'all of ' * weights}it, and"
            f" the Hub cannot be asked: {why}. On a machine that reaches it: hf download {path}"
            f" --local-dir FOLDER, then {key}=FOLDER"
        )
    return Resolved(_downloaded(path, commit, weights, key), commit)


def _commit(path: str, revision: str | None) -> tuple[str | None, str]:
    """The commit that a name stands for, else None and why the Hub did not say it.

    Raises ConfigError for what does not exist.
    """
    from huggingface_hub import constants

    if revision is not None and COMMIT.fullmatch(revision):
        return revision, ""
    return (None, "HF_HUB_OFFLINE is set") if constants.HF_HUB_OFFLINE else _asked(path, revision)


@cache
def _asked(path: str, revision: str | None) -> tuple[str | None, str]:
    """Once per process, so that one start asks for one answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    found: list[str | Exception] = []

    def ask() -> None:
        try:
            found.append(HfApi().model_info(path, revision=revision, timeout=HUB).sha or "")
        except (
            Exception
        ) as error:  # no network, no such model, no permission: its classes are many, and change
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no limit of its own
    asking.start()
    asking.join(HUB)
    answer = found[0] if found else TimeoutError(f"no answer within {HUB:g} s")
    if isinstance(answer, str):
        return answer, ""
    if isinstance(answer, RevisionNotFoundError):
        raise ConfigError(
            f"model.revision: {revision} does not exist of {path} on the Hub"
        ) from answer
    # GatedRepoError derives from it, but means that the model exists.
    if isinstance(answer, RepositoryNotFoundError) and not isinstance(answer, GatedRepoError):
        why = "the Hub has no such model, or shows it only with a token (hf auth login)"
    else:
        why = f"{type(answer).__name__}: {str(answer).splitlines()[0][:200] if str(answer) else ''}"
    return None, why


def _cached(path: str, revision: str | None) -> Resolved | None:
    """The snapshot in the Hub's cache, if it has a configuration and a tokenizer; other programs
    may have left a part.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(path, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None
    texts = (folder / "config.json").is_file() and any(folder.glob("tokenizer*"))
    return Resolved(folder, folder.name) if texts else None


def _downloaded(path: str, commit: str, weights: bool, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                path, revision=commit, allow_patterns=[*TEXTS], ignore_patterns=["*/*"]
            )
        )
        if weights:
            # The index names the files that count; a repository
            # may have the weights in several formats.
            files = [file.name for file in Resolved(folder)._named()] or [WEIGHTS]
            snapshot_download(
                path,
                revision=commit,
                allow_patterns=files,
                ignore_patterns=["*/*", "consolidated*"],
            )
        return folder
    except Exception as error:  # as above; a disk may also be full
        raise ConfigError(
            f"{key}: {path} at {commit} could not be downloaded: {type(error).__name__}:"
            f" {str(error)[:300]}"
        ) from error
