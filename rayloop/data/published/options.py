"""The options of ``data prepare NAME``."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayloop.core.failures import ConfigError
from rayloop.data.published.source import ColumnMap
from rayloop.data.published.video import FRAMES_PER_SECOND

GENERIC = "generic"
"""The data set whose column map the user gives with ``--map``."""


@dataclass(frozen=True)
class PrepareOptions:
    """Which rows of a published data set are written, and how."""

    published: tuple[str, ...] = ()
    """Published splits to read; empty: all."""
    new: Mapping[str, int] = field(default_factory=dict)
    """Rows of each new split."""
    most: int | None = None
    """Rows at most."""
    original: bool = False
    """Whether new splits keep the published order."""
    seed: int = 0
    """Seed of the splits and of their order."""
    fps: float = FRAMES_PER_SECOND
    """Frames of a video that are kept, per second; 0 keeps every frame."""
    images: Path | None = None
    """Folder of the images that rows name by paths of another machine."""
    where: str = ""
    """COLUMN=VALUE of the rows to take; empty: all."""


def options_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of the options of ``data prepare NAME``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m rayloop data prepare {name}", description=description
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write SPLIT.jsonl and images/ into"
    )
    _add_source_options(parser)
    _add_split_options(parser)
    parser.add_argument(
        "--fps",
        type=float,
        default=FRAMES_PER_SECOND,
        help="frames of a video that are kept, a second; 0: each (default: %(default)s)",
    )
    if name == GENERIC:
        parser.add_argument(
            "--map", type=Path, required=True, metavar="FILE.yaml", help="whose columns are which"
        )
    return parser


def _add_source_options(parser: argparse.ArgumentParser) -> None:
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


def _add_split_options(parser: argparse.ArgumentParser) -> None:
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


def checked_options(arguments: argparse.Namespace, how: ColumnMap) -> PrepareOptions:
    """The parsed arguments as options for the data set of this map. Raises ConfigError."""
    images = arguments.images_root
    if not 0 <= arguments.fps < math.inf:
        raise ConfigError(f"--fps {arguments.fps}: frames per second; 0 keeps every frame")
    if images is not None and not images.is_dir():
        raise ConfigError(f"--images-root {images} is not a folder (seen from {Path.cwd()})")
    if arguments.where and "=" not in arguments.where:
        raise ConfigError(
            f"--where {arguments.where}: expected COLUMN=VALUE, the column as it is in the written"
            " rows"
        )
    published, new = _requested_splits(arguments.splits, how)
    return PrepareOptions(
        published=published,
        new=new,
        most=arguments.max_samples,
        original=arguments.original_split,
        seed=arguments.seed,
        fps=arguments.fps,
        images=images,
        where=arguments.where,
    )


def _requested_splits(
    texts: Sequence[str], how: ColumnMap
) -> tuple[tuple[str, ...], dict[str, int]]:
    """The published splits (``SPLIT``), and the rows of new ones (``SPLIT=N``).

    Raises ConfigError.
    """
    new: dict[str, int] = {}
    published: list[str] = []
    for text in texts:
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
