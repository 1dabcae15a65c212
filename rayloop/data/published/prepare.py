"""Writes a published data set as JSONL with images beside it: ``python -m rayloop data prepare NAME
--out DIR``.
"""

import argparse
import base64
import binascii
import hashlib
import io
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from rayloop.config.settings import load
from rayloop.core.failures import ConfigError, DataFailure, ImageRefused
from rayloop.core.files import write_whole
from rayloop.core.types import ImageSource, derive
from rayloop.data.images import FOREIGN, FORMATS, MAX_PIXELS, probe
from rayloop.data.images import frame as read_frame
from rayloop.data.images import read as read_image
from rayloop.data.messages import image_entry
from rayloop.data.published.films import FRAMES_PER_SECOND, taken_apart
from rayloop.data.published.source import (
    ColumnMap,
    NewSplit,
    entries,
    folder,
    fractions,
    mapped,
    present,
)
from rayloop.sandbox.pictures import rgb

SHOWN = 5
"""Reasons for rows left out that are named; the others are counted."""
_NAMES = re.compile(r"\S*[\\/.\d]\S*")
Row = dict[str, Any]


def main(name: str, maps: Mapping[str, Path], arguments: Sequence[str]) -> int:
    """Parse the options of ``data prepare NAME`` and do it.

    Returns exit code 0; raises ConfigError.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m rayloop data prepare {name}", description=__doc__
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write SPLIT.jsonl and images/ into"
    )
    parser.add_argument(
        "--from",
        dest="local",
        type=Path,
        metavar="FOLDER",
        help="the published files (default: the Hub)",
    )
    parser.add_argument(
        "--images-root",
        type=Path,
        metavar="FOLDER",
        help=(
            "folder of files that rows name by paths of another machine; a file is found by the"
            " longest end of its path"
        ),
    )
    parser.add_argument(
        "--hub",
        default="",
        metavar="OWNER/NAME",
        help="another data set of the Hub in the same layout",
    )
    parser.add_argument(
        "--max-samples",
        type=int,
        metavar="N",
        help="rows at most: of all new splits, of each published one",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        default=[],
        metavar="SPLIT[=N]",
        help="published splits to write, or new ones with their rows",
    )
    parser.add_argument(
        "--where",
        default="",
        metavar="COLUMN=VALUE",
        help="rows with this value alone, such as origin=human",
    )
    parser.add_argument(
        "--original-split",
        action="store_true",
        help="new splits in the published order, not shuffled",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the shuffled splits (default: %(default)s)"
    )
    parser.add_argument(
        "--fps",
        type=float,
        default=FRAMES_PER_SECOND,
        help="frames of a film that are kept, a second; 0: each (default: %(default)s)",
    )
    if name == "generic":
        parser.add_argument(
            "--map", type=Path, required=True, metavar="FILE.yaml", help="whose columns are which"
        )
    chosen = parser.parse_args(arguments)
    how = load(chosen.map if name == "generic" else maps[name], (), ColumnMap)
    if not 0 <= chosen.fps < math.inf:
        raise ConfigError(f"--fps {chosen.fps}: frames per second; 0 keeps every frame")
    if chosen.images_root is not None and not chosen.images_root.is_dir():
        raise ConfigError(
            f"--images-root {chosen.images_root} is no folder (seen from {Path.cwd()})"
        )
    if chosen.where and "=" not in chosen.where:
        raise ConfigError(
            f"--where {chosen.where}: expected COLUMN=VALUE, the column as it is in the written"
            " rows"
        )
    wanted = Wanted(
        *_splits(chosen.splits, how),
        chosen.max_samples,
        chosen.original_split,
        chosen.seed,
        fps=chosen.fps,
        images=chosen.images_root,
        where=chosen.where,
    )
    source = folder(how, chosen.local, chosen.hub)
    written, left_out = prepare(how, source, chosen.out, wanted)
    for split, count in written.items():
        print(f"{chosen.out / f'{split}.jsonl'}: {count} rows")
    for line in reasons(left_out):
        print(f"left out: {line}")
    return 0


def reasons(failures: Sequence[DataFailure]) -> list[str]:
    """Each reason with the number of its rows and the first of them, the most frequent first; names
    and numbers do not count.
    """
    kinds: dict[str, list[DataFailure]] = defaultdict(list)
    for failure in failures:
        kinds[_NAMES.sub("", failure.reason)].append(failure)
    found = sorted(kinds.values(), key=len, reverse=True)
    rest = (
        [f"{sum(map(len, found[SHOWN:]))} rows for {len(found) - SHOWN} other reasons"]
        if len(found) > SHOWN
        else []
    )
    return [
        f"{len(same)} row{'s' * (len(same) > 1)}, such as {same[0]}" for same in found[:SHOWN]
    ] + rest


@dataclass(frozen=True)
class Wanted:
    """``published``: which splits to read, empty for all; ``new``: rows of each new split;
    ``most``: rows at most; ``images``: the folder of images that the rows name by paths of another
    machine; ``where``: COLUMN=VALUE of the rows to take, empty for all.
    """

    published: tuple[str, ...] = ()
    new: Mapping[str, int] = field(default_factory=dict)
    most: int | None = None
    original: bool = False
    seed: int = 0
    fps: float = FRAMES_PER_SECOND
    images: Path | None = None
    where: str = ""


def prepare(
    how: ColumnMap, source: Path, out: Path, wanted: Wanted = Wanted()
) -> tuple[dict[str, int], list[DataFailure]]:
    """Write ``out/SPLIT.jsonl``, ``images`` and ``frames``; return each split's rows, and those
    left out. Raises ConfigError.
    """
    splits = wanted.published or present(how, source)
    left_out: list[DataFailure] = []
    light: list[tuple[str, Row]] = []
    for split in splits:
        for row in _rows(how, source, split, wanted.where):
            if isinstance(row, DataFailure):
                left_out.append(row)
            else:
                # Pictures are left out: the split is chosen over all
                # rows, which would not fit into memory with them.
                light.append(
                    (
                        split,
                        {
                            name: value
                            for name, value in row.items()
                            if name not in ("image", "videos")
                        },
                    )
                )
    if not light:
        raise _no_row(source, left_out, wanted.where)
    chosen = _chosen(how, light, wanted)
    written: dict[str, list[Row]] = {}
    pictures, place = (
        Pictures(out, source, how.image_folders, wanted.images, fps=wanted.fps),
        iter(chosen),
    )
    out.mkdir(parents=True, exist_ok=True)
    for split in splits:
        for row in _rows(how, source, split, wanted.where):
            # The second reading gives the same rows in the
            # same order, so that ``chosen`` matches them.
            if isinstance(row, DataFailure) or (target := next(place)) is None:
                continue
            try:
                finished = _finished(how, row, pictures)
            except DataFailure as failure:
                left_out.append(failure)
            else:
                written.setdefault(target, []).append(finished)
    if not written:
        raise _no_row(source, left_out)
    for split, rows in written.items():
        if not wanted.original and split not in splits:
            random.Random(derive(wanted.seed, "order", split)).shuffle(rows)
        write_whole(
            out / f"{split}.jsonl",
            "".join(json.dumps(row, default=str) + "\n" for row in rows).encode(),
        )
    return {
        split: len(written[split]) for split in sorted(written, key=lambda one: one != REST)
    }, left_out


def _no_row(source: Path, left_out: Sequence[DataFailure], where: str = "") -> ConfigError:
    nothing = f": none has {where}" if where else ": its files are empty"
    why = "".join(f"\n    {line}" for line in reasons(left_out)) or nothing
    return ConfigError(f"{source} has no row that can be used{why}")


def _rows(how: ColumnMap, source: Path, split: str, where: str) -> Iterator[Row | DataFailure]:
    """Our rows, each with ``@folder`` and ``@suffix``, its file's; ``where`` as in ``Wanted``."""
    column, _, value = where.partition("=")
    for entry in entries(how, source, split):
        if isinstance(entry, DataFailure):
            yield entry
            continue
        try:
            row = mapped(how, entry)
        except DataFailure as failure:
            yield failure
            continue
        if not where or str(row.get(column)) == value:
            yield {**row, "@folder": entry["@folder"], "@suffix": entry["@suffix"]}


def _chosen(how: ColumnMap, light: Sequence[tuple[str, Row]], wanted: Wanted) -> list[str | None]:
    """The split that each row is written to; None for a row that is not wanted."""
    rows = [row for _, row in light]
    if not wanted.new and (wanted.published or not how.make):
        published = list(dict.fromkeys(split for split, _ in light))
        result: list[str | None] = [None] * len(light)
        for split in published:
            at = [index for index, (name, _) in enumerate(light) if name == split]
            most = wanted.most or how.sample
            taken = _cut(
                how, [rows[index] for index in at], {split: min(most or len(at), len(at))}, wanted
            )
            for index, name in zip(at, taken, strict=True):
                result[index] = name
        return result
    return _cut(
        how,
        rows,
        dict(wanted.new) or sizes(min(wanted.most or len(rows), len(rows)), how.make),
        wanted,
    )


def _cut(
    how: ColumnMap, rows: Sequence[Row], new: Mapping[str, int], wanted: Wanted
) -> list[str | None]:
    if wanted.original:
        return in_order(len(rows), new)
    strata = [tuple(str(row.get(name)) for name in how.stratify) for row in rows]
    groups = [
        str(row.get(how.together)) if how.together else str(index) for index, row in enumerate(rows)
    ]
    if len(new) == 1:
        # With one split no two can share a picture, and single rows keep the shares closer.
        groups = [str(index) for index in range(len(rows))]
    return stratified(strata, groups, new, derive(wanted.seed, "splits"))


def _finished(how: ColumnMap, row: Row, pictures: "Pictures") -> Row:
    """With the image as a file, the box as fractions, and videos as what the interpreter reads.

    Raises DataFailure.
    """
    where, beside, suffix = str(row["id"]), str(row.pop("@folder")), row.pop("@suffix")
    if "image" in row:
        row["image"], width, height = pictures.keep(row["image"], beside, where)
        if "bbox" in row:
            kind = how.boxes[suffix] if isinstance(how.boxes, dict) else how.boxes
            row["bbox"] = fractions(row["bbox"], kind, width, height, where)
    if "videos" in row:
        row["videos"], rates = pictures.frames(row["videos"], beside, where)
        row |= {"fps": rates[0] if len(set(rates)) == 1 else rates} if any(rates) else {}
    return row


def _splits(asked: Sequence[str], how: ColumnMap) -> tuple[tuple[str, ...], dict[str, int]]:
    """``SPLIT`` names published splits, ``SPLIT=N`` makes new ones. Raises ConfigError."""
    new, published = {}, []
    for text in asked:
        name, equals, count = text.partition("=")
        if not equals and name in how.files:
            published.append(name)
        elif equals and count.isdigit() and int(count):
            new[name] = int(count)
        else:
            raise ConfigError(
                f"--splits {text}: expected one of {', '.join(how.files)}, or SPLIT=ROWS for a new"
                " split"
            )
    return tuple(published), new


REST = "train"
"""The split that takes what no other asks for."""


def sizes(count: int, make: Mapping[str, NewSplit]) -> dict[str, int]:
    """Rows of each split out of ``count``, ``train`` first: 1200 with Arc Vision's shares make 900
    train, 60 val, 240 test.
    """
    taken = {name: min(int(count * new.share), new.most or count) for name, new in make.items()}
    return {
        REST: count - sum(taken.values()),
        **{name: size for name, size in taken.items() if name != REST},
    }


def in_order(count: int, wanted: Mapping[str, int]) -> list[str | None]:
    """The split of each row: the first ``wanted[split]`` rows, then those of the next split; None
    for rows left over.
    """
    names = [name for name, size in wanted.items() for _ in range(size)][:count]
    return [*names, *[None] * (count - len(names))]


def stratified(
    strata: Sequence[Hashable], groups: Sequence[Hashable], wanted: Mapping[str, int], seed: int
) -> list[str | None]:
    """The split of each row, None for rows left over: strata in equal shares, no group in two
    splits. A whole group goes to the split that lacks most of its strata (Sechidis et al., 2011).
    Raises ConfigError when rows are too few.
    """
    count, total = len(strata), sum(wanted.values())
    if total > count:
        raise ConfigError(f"{total} rows are wanted for {', '.join(wanted)}, and there are {count}")
    parts: dict[str | None, int] = {name: size for name, size in wanted.items() if size}
    if count > total:
        parts[None] = count - total
    of = Counter(strata)
    lacks = {
        (part, stratum): size * of[stratum] / count
        for part, size in parts.items()
        for stratum in of
    }
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    order = sorted(members, key=str)
    random.Random(seed).shuffle(order)
    room, result = dict(parts), list[str | None]([None] * count)
    for group in order:
        rows = members[group]

        def lack(part: str | None, rows: Sequence[int] = rows) -> tuple[bool, float]:
            return (
                room[part] >= len(rows),
                sum(lacks[part, strata[row]] for row in rows) / parts[part],
            )

        best = max(parts, key=lack)
        room[best] -= len(rows)
        for row in rows:
            lacks[best, strata[row]] -= 1
            result[row] = best
    return result


FRAMES = (".png", ".jpg", ".jpeg", ".webp")
ANIMATED = (".gif", ".webp")
READ = (*FORMATS, *FOREIGN)
_SUFFIX = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
NAME = 20
"""Hexadecimal digits of a file's name."""


class Pictures:
    """Writes images below ``out/images`` and frames of films below ``out/frames``; reads paths
    below ``folders`` of the data set's ``root``, beside the row's file, and by their longest end
    below ``elsewhere``.
    """

    def __init__(
        self,
        out: Path,
        root: Path,
        folders: Sequence[str],
        elsewhere: Path | None = None,
        *,
        fps: float = FRAMES_PER_SECOND,
    ) -> None:
        self._out, self._root, self._folders, self._elsewhere, self._fps = (
            out,
            root,
            folders,
            elsewhere,
            fps,
        )
        self._sizes: dict[str, tuple[int, int]] = {}

    def keep(self, entry: Any, beside: str, where: str) -> tuple[str, int, int]:
        """The image's path relative to ``out``, width and height in pixels; other formats become
        PNG. Raises DataFailure.
        """
        data = _plain(self._bytes(entry, beside, where), where)
        name = hashlib.sha256(data).hexdigest()[:NAME]
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            path = f"images/{name}.{_SUFFIX[str(image.format)]}"
        if path not in self._sizes:
            _, width, height = probe(image_entry({"bytes": data}, where, self._root))
            file = self._out / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            self._sizes[path] = width, height
        return path, *self._sizes[path]

    def frames(self, entry: Any, beside: str, where: str) -> tuple[list[Any], list[float]]:
        """Of each video the path, relative to ``out``, of an animated picture, or those of its
        frames (a film is taken apart into them), and its frames per second, 0 where only a film
        would say. Raises DataFailure.
        """
        found: list[Any] = []
        rates: list[float] = []
        for one in entry if isinstance(entry, list | tuple) else (entry,):
            path = self._found(str(one), beside, where, or_folder=True)
            folder, rate = path if path.is_dir() else path.with_suffix(""), 0.0
            if path.suffix.lower() in ANIMATED and path.is_file():
                found.append(self._relative(path, alone=True))
            elif folder.is_dir() and (
                shots := sorted(p for p in folder.iterdir() if p.suffix.lower() in FRAMES)
            ):
                found.append([self._relative(shot) for shot in shots])
            else:
                made, rate = taken_apart(path, self._out / "frames", self._fps, where)
                found.append([self._relative(frame) for frame in made])
            rates.append(rate)
        return found, rates

    def _relative(self, file: Path, alone: bool = False) -> str:
        """The path relative to ``out`` of a picture of a video (``alone``: of a whole one), which
        is copied there unless it lies there. Raises DataFailure for what is no picture.
        """
        out, file = self._out.resolve(), file.resolve()
        if not file.is_relative_to(out):
            copy = (
                out
                / "frames"
                / f"{file.parent.name}-{hashlib.sha256(str(file.parent).encode()).hexdigest()[:8]}"
                / file.name
            )
            if not copy.is_file() or copy.stat().st_size != file.stat().st_size:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(read_frame(ImageSource(path=str(file)), alone))
            file = copy
        return str(file.relative_to(out))

    def _bytes(self, entry: Any, beside: str, where: str) -> bytes:
        value = entry
        if isinstance(entry, Mapping) and entry.get("bytes") is None:
            value = entry.get("path") or entry.get("image")
        if isinstance(value, str) and (encoded := _base64(value)) is not None:
            return encoded
        if isinstance(value, str) and not value.startswith("data:"):
            return read_image(ImageSource(path=str(self._found(value, beside, where))))
        return read_image(image_entry(value, where, self._root))

    def _found(self, name: str, beside: str, where: str, or_folder: bool = False) -> Path:
        places = [*(self._root / folder / name for folder in self._folders), Path(beside) / name]
        if self._elsewhere is not None:
            parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".", "..")]
            places += [self._elsewhere.joinpath(*parts[start:]) for start in range(len(parts))]
        for place in filter(self._inside, places):
            if place.is_file() or (
                or_folder and (place.is_dir() or place.with_suffix("").is_dir())
            ):
                return place
        if any(place.is_file() for place in places):
            raise DataFailure(
                where,
                f"{name} lies outside the data set; --images-root FOLDER says where its files"
                " may be",
            )
        hint = (
            ""
            if self._elsewhere or not Path(name).is_absolute()
            else "; --images-root FOLDER says where such files are here"
        )
        raise DataFailure(
            where, f"no file {name}; looked for {', '.join(map(str, dict.fromkeys(places)))}{hint}"
        )

    def _inside(self, place: Path) -> bool:
        """Whether a place lies in the data set, or where its files are said to be, links followed:
        its rows and its links may name any file of this machine.
        """
        roots = [self._root, *([self._elsewhere] if self._elsewhere else [])]
        if self._root.parent.name == "snapshots":  # the Hub's cache, whose files are links
            roots.append(self._root.parent.parent / "blobs")
        found = place.resolve()
        return any(found.is_relative_to(root.resolve()) for root in roots)


def _base64(text: str) -> bytes | None:
    """The picture that a text encodes; None for a path."""
    if len(text) < 100:
        return None
    try:
        data = base64.b64decode(text, validate=True)
        Image.open(io.BytesIO(data), formats=READ).close()
    except (binascii.Error, ValueError, OSError):
        return None
    return data


def _plain(data: bytes, where: str) -> bytes:
    try:
        with Image.open(io.BytesIO(data), formats=READ) as image:
            if image.format in FORMATS:
                return data
            if image.width * image.height > MAX_PIXELS:
                raise ImageRefused(
                    where, f"{image.width}x{image.height} pixels, the limit is {MAX_PIXELS} pixels"
                )
            file = io.BytesIO()
            rgb(image).save(file, "PNG")
            return file.getvalue()
    except (OSError, ValueError, SyntaxError) as error:
        raise DataFailure(where, f"no readable image: {error}") from error
