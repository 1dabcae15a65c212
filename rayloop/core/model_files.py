"""Where a model is: a local folder, or a commit of a model of the Hub.

The same name may stand for another commit tomorrow.
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

WHOLE_FILE_BYTES = 2**26
"""The most bytes of a file that is hashed as a whole."""
BLOCKS_PER_FILE = 16
"""The number of places at which a larger file is hashed, besides its size."""
BLOCK_BYTES = 2**16
"""Bytes that are hashed at each of these places."""
HUB_TIMEOUT_S = 3.0
"""Seconds within which the Hub must answer which commit a name stands for; it is asked once."""
HUB_NAME = re.compile(r"(?!.*\.\.)\w[\w.-]*/\w[\w.-]*")
RECIPE_MODEL = re.compile(r"(?:.*/)?recipes/(\w+)/tiny/?")
"""The folder of a recipe's model, which a wheel does not have."""
COMMIT = re.compile(r"[0-9a-f]{40}")
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
"""The files of peft's adapters, which are not a model."""
TEXTS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
WEIGHTS = "*.safetensors"
WHOLE_MODEL = "model.safetensors"
"""The file of all weights."""
INDEX = "model.safetensors.index.json"
"""The file that names the file of each tensor, where the weights are in several."""


def hashed(files: Iterable[Path]) -> str:
    """16 hex digits over the names, sizes and contents of the files that exist, in their order."""
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with open(file, "rb") as content:
            if size <= WHOLE_FILE_BYTES:
                digest.update(content.read())
                continue
            for number in range(BLOCKS_PER_FILE):
                # The places are even from the first to the
                # last block, so that both ends are covered.
                content.seek((size - BLOCK_BYTES) * number // (BLOCKS_PER_FILE - 1))
                digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def header(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a safetensors file, from its JSON header.

    The first 8 bytes hold the header's length. Raises ConfigError for another file.
    """
    try:
        with open(file, "rb") as content:
            length = int.from_bytes(content.read(8), "little")
            # In another file these eight bytes can mean an exabyte.
            tensors = json.loads(content.read(min(length, file.stat().st_size)))
        tensors.pop("__metadata__", None)
        return {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model.path: {file} is not a safetensors file; is it a pointer of git-lfs (git lfs"
            " pull)?"
        ) from error


@dataclass(frozen=True, slots=True)
class Stored:
    """The file and the shape of a model's tensor."""

    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Resolved:
    """Where a model's files are on this machine.

    ``commit`` is that of a model of the Hub; None: the path names ``folder`` itself.
    """

    folder: Path
    commit: str | None = None

    def identity(self) -> dict[str, str]:
        """The hash of a folder's files, or a Hub model's commit, which identifies its files."""
        if self.commit:
            return {"commit": self.commit}
        return {"files": hashed(sorted(self.folder.iterdir()))}

    @property
    def weights(self) -> list[Path]:
        """The files of weights: the files in the index, else model.safetensors, else any.

        Repositories may hold two sets.
        """
        files: Iterable[Path] = self._indexed_files()
        single_file = self.folder / WHOLE_MODEL
        if not files:
            files = [single_file] if single_file.is_file() else self.folder.glob(WEIGHTS)
        return sorted(file for file in files if file.is_file())

    def stored(self) -> dict[str, Stored]:
        """The model's tensors by name, of the files of ``weights``; empty without safetensors.

        With an index only the tensors that it names are the model's. Raises ConfigError for a
        tensor that is missing, or in two of the files.
        """
        places = self._index()
        tensors: dict[str, Stored] = {}
        for file in self.weights:
            for name, shape in header(file).items():
                # Repositories hold further files, such as a
                # second precision, that the index does not name.
                if places and name not in places:
                    continue
                if name in tensors:
                    raise ConfigError(
                        f"{self.folder}: {name} is in {tensors[name].file.name} and in {file.name};"
                        " remove one of them"
                    )
                tensors[name] = Stored(file, shape)
        missing = sorted(places.keys() - tensors.keys())
        if missing:
            where = f"{places[missing[0]].name}, as {INDEX} says"
            raise ConfigError(
                f"{self.folder} lacks {counted(len(missing), 'tensor')} of the model, first"
                f" {missing[0]} in {where}"
            )
        return tensors

    def refuse_two_models(self) -> None:
        """Raises ConfigError for a folder from which programs load different weights."""
        single_file = self.folder / WHOLE_MODEL
        indexed = self._indexed_files()
        if indexed and single_file.is_file() and single_file not in indexed:
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
        """Whether all weights are in the folder."""
        return bool(self.weights) and all(file.is_file() for file in self._indexed_files())

    def _indexed_files(self) -> set[Path]:
        """The files that the index names; empty without an index."""
        return {*self._index().values()}

    def _index(self) -> dict[str, Path]:
        """The file of each tensor by the index; empty without one. Raises ConfigError."""
        index = self.folder / INDEX
        if not index.is_file():
            return {}
        try:
            places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self.folder / file for name, file in places.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{index} is not an index of weights ({type(error).__name__}: {error}). Download it"
                " again"
            ) from error


def are_adapters(folder: Path) -> bool:
    """Whether the folder holds peft's adapters without their model."""
    return (folder / ADAPTERS[0]).is_file() and not (folder / "config.json").is_file()


def resolve(
    path: str, revision: str | None = None, *, weights: bool = False, key: str = "model.path"
) -> Resolved:
    """The files of a model: a local folder, or a model of the Hub, downloaded if necessary.

    ``revision`` is a commit, a tag or a branch; None: main. Without an answer of the Hub the cached
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
    # Where a folder has the owner's name, the name is a mistyped path.
    if Path(path).parent.is_dir() or not HUB_NAME.fullmatch(path):
        raise ConfigError(
            f"{key}: {path} is neither a folder here nor a name on the Hub (owner/name)."
            f" {_origin(path)}"
        )
    commit, reason = _commit(path, revision)
    cached = _cached(path, commit or revision)
    if cached is not None and (cached.whole or not weights):
        return cached
    if commit is None or reason:
        extent = "all of it" if weights else "it"
        raise ConfigError(
            f"{key}: {path} is not a folder here, the cache does not have {extent}, and the Hub"
            f" cannot be asked: {reason}. On a machine that reaches it: hf download {path}"
            f" --local-dir FOLDER, then {key}=FOLDER"
        )
    return Resolved(_downloaded(path, commit, weights, key), commit)


def _origin(path: str) -> str:
    recipe = RECIPE_MODEL.fullmatch(path)
    if recipe is None:
        return "`python -m rayloop sft` makes a policy"
    return (
        "Only the quickstart's model is installed: a checkout of rayloop has this one,"
        f" and `python -m tools.makers {recipe[1]}` makes it there"
    )


def _commit(path: str, revision: str | None) -> tuple[str | None, str]:
    """The commit that a name stands for, else None and the reason why the Hub did not answer.

    Raises ConfigError for a revision that does not exist.
    """
    from huggingface_hub import constants

    if revision is not None and COMMIT.fullmatch(revision):
        return revision, ""
    if constants.HF_HUB_OFFLINE:
        return None, "HF_HUB_OFFLINE is set"
    return _answer_of_hub(path, revision)


@cache
def _answer_of_hub(path: str, revision: str | None) -> tuple[str | None, str]:
    """``_commit`` by the Hub, asked once per process, so that one start sees one answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    answers: list[str | Exception] = []

    def ask() -> None:
        try:
            answers.append(
                HfApi().model_info(path, revision=revision, timeout=HUB_TIMEOUT_S).sha or ""
            )
        # No network, no such model, no permission: the Hub has many classes, which change.
        except Exception as error:
            answers.append(error)

    # In a thread, since looking up the host's name has no limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    answer = answers[0] if answers else TimeoutError(f"no answer within {HUB_TIMEOUT_S:g} s")
    if isinstance(answer, str):
        return answer, ""
    if isinstance(answer, RevisionNotFoundError):
        raise ConfigError(
            f"model.revision: {revision} does not exist of {path} on the Hub"
        ) from answer
    # GatedRepoError derives from it, but means that the model exists.
    if isinstance(answer, RepositoryNotFoundError) and not isinstance(answer, GatedRepoError):
        return None, "the Hub has no such model, or shows it only with a token (hf auth login)"
    first_line = str(answer).splitlines()[0] if str(answer) else ""
    return None, f"{type(answer).__name__}: {first_line[:200]}"


def _cached(path: str, revision: str | None) -> Resolved | None:
    """The snapshot in the Hub's cache, if it has a configuration and a tokenizer.

    Other programs may have left a part of it.
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
            files = [file.name for file in Resolved(folder)._indexed_files()] or [WEIGHTS]
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
