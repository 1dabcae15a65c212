"""Rows that a stranger wrote: what they name is read only when it is a picture of a bounded size in
the folder of the rows.
"""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from rayloop.cli import main
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.files import content
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data import images
from rayloop.data import rows as data_rows
from rayloop.data.dataset import ChatRows, Dataset
from rayloop.envs.interpreter.environment import _videos
from tests.support.runs import ROOT

SECRET = "SECRET-OF-THE-USER"
PRODUCT = ("rayloop", "judge", "recipes", "actors", "cluster", "serve_apps")


def picture(path: Path, kind: str = "PNG") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 9), "red").save(path, kind)
    return path


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(40 << 30)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ENDLESS: tuple[Callable[[Path], None], ...] = (pipe, device, sparse, listener)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("made", ENDLESS)
def test_what_is_no_file_of_a_bounded_size_is_not_read(
    made: Callable[[Path], None], tmp_path: Path
) -> None:
    made(tmp_path / "f.png")
    with pytest.raises(DataFailure, match=r"regular file|more than \d+ bytes|No such device"):
        images.probe(ImageSource(path=str(tmp_path / "f.png")))
    with pytest.raises(OSError, match=r"regular file|more than 10 bytes|No such device"):
        content(tmp_path / "f.png", 10)


def test_a_file_that_grows_while_it_is_read_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"x" * 20)
    found = os.stat_result((0o100644, *[0] * 9))
    monkeypatch.setattr(os, "fstat", lambda handle: found)
    with pytest.raises(OSError, match="more than 10 bytes") as caught:
        content(tmp_path / "f", 10)
    assert caught.value.errno == errno.EFBIG


def read(folder: Path, *, anywhere: bool = False, **row: Any) -> list[str]:
    """Why rows were left out; "" for one that was not."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text(
        json.dumps({"prompt": "?", "answer": "1", **row}) + "\n" + '{"prompt": "kept"}\n',
        encoding="utf-8",
    )
    bad = list[str]()
    reader = ChatRows(ChatRows.Settings())
    Dataset(
        folder / "rows.jsonl",
        reader,
        False,
        lambda failure: bad.append(str(failure)),
        anywhere=anywhere,
    )
    return bad


@pytest.fixture
def private(tmp_path: Path) -> Path:
    return picture(tmp_path / "home/photo.png")


def named(folder: Path, private: Path) -> Iterator[dict[str, Any]]:
    """Every way by which a row may name a file outside of its folder."""
    (folder / "link.png").symlink_to(private)
    (folder / "linked").symlink_to(private.parent)
    for path in (
        str(private),
        f"file://{private}",
        "../home/photo.png",
        "a/../../home/photo.png",
        "link.png",
        "linked/photo.png",
    ):
        yield {"images": [path]}
        yield {"images": [{"path": path}]}
        yield {"prompt": [{"role": "user", "content": [{"type": "image", "image": path}]}]}
    for path in (str(private), str(folder / "link.png")):
        yield {"videos": [path]}
        yield {"videos": path}
        yield {"videos": [[path, path]]}


def test_a_row_names_files_of_its_own_folder_only(tmp_path: Path, private: Path) -> None:
    folder = tmp_path / "data"
    picture(folder / "images/a.png")
    assert not read(folder, images=["images/a.png", str(folder / "images/a.png")])
    for row in named(folder, private):
        [why] = read(folder, **row)
        assert "lies outside the folder of its data; data.anywhere=true allows it" in why
        assert not read(folder, **row, anywhere=True)


def test_rows_behind_a_link_may_name_what_is_beside_their_file(tmp_path: Path) -> None:
    picture(tmp_path / "data/a.png")
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    assert not read(tmp_path / "linked", images=["a.png"])


def test_validate_says_so_and_can_be_told(
    tmp_path: Path, private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data/rows.jsonl"
    file.write_text(
        json.dumps({"prompt": "?", "images": [str(private)], "answer": "1"})
        + '\n{"prompt": "b", "answer": "2"}\n'
    )
    assert main(["data", "validate", str(file)]) == 1
    assert "data.anywhere=true" in capsys.readouterr().out
    assert main(["data", "validate", str(file), "--anywhere"]) == 0


@pytest.mark.parametrize("videos", [["key"], [["key", "key"]], [["a.png", "key"]]])
def test_a_video_is_made_of_pictures(videos: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET, encoding="utf-8")
    picture(tmp_path / "a.png")
    task = Task("t", (Message("user", ("?",)),), extra={"videos": _placed(videos, tmp_path)})
    with pytest.raises(DataFailure, match="not a picture of a video"):
        _videos(task)


def test_a_video_may_be_one_animated_picture_or_frames(tmp_path: Path) -> None:
    picture(tmp_path / "a.gif", "GIF")
    picture(tmp_path / "b.webp", "WEBP")
    task = Task(
        "t",
        (Message("user", ("?",)),),
        extra={"videos": _placed(["a.gif", ["b.webp", "b.webp"]], tmp_path)},
    )
    assert [len(video) for video in _videos(task)] == [1, 2]
    with pytest.raises(DataFailure, match="not a picture of a video"):
        _videos(Task("t", (), extra={"videos": [_placed(["a.gif", "a.gif"], tmp_path)]}))


def _placed(value: Any, folder: Path) -> Any:
    return (
        str(folder / value) if isinstance(value, str) else [_placed(one, folder) for one in value]
    )


def test_a_parquet_file_that_becomes_a_thousand_times_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are decoded few at a time, so that it is noticed long before the memory is full."""
    monkeypatch.setattr(data_rows, "MIN_DECODED_LIMIT_BYTES", 10 << 20)
    monkeypatch.setattr(data_rows, "DECODED_AT_ONCE_BYTES", 4 << 20)
    table = pyarrow.table(
        {"prompt": pyarrow.array(["x" * (1 << 20)] * 100), "answer": pyarrow.array(["1"] * 100)}
    )
    pyarrow.parquet.write_table(
        table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=True
    )
    assert (tmp_path / "bomb.parquet").stat().st_size < 10_000
    found = data_rows.rows(tmp_path / "bomb.parquet")
    given = [where for where, _ in islice(found, 8)]
    with pytest.raises(ConfigError, match="more than 1000 times the file's"):
        given += [where for where, _ in found]
    assert len(given) < 12


def test_rows_that_repeat_a_long_prompt_are_no_bomb(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["Look closely. " * 500] * 5000, "answer": ["1"] * 5000})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    assert sum(1 for _ in data_rows.rows(tmp_path / "rows.parquet")) == 5000


def opened_anyhow(file: Path) -> Iterator[str]:
    """Where a file of the product lets Pillow choose among all formats."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        opens = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Image.open")
        if (
            isinstance(node, ast.Call)
            and opens
            and "formats" not in {keyword.arg for keyword in node.keywords}
        ):
            yield f"{file.relative_to(ROOT)}:{node.lineno}"


def test_pillow_never_chooses_the_format_of_a_file() -> None:
    """Some of its formats start other programs: Ghostscript for EPS."""
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    assert [place for file in files for place in opened_anyhow(file)] == []


def eps() -> bytes:
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nnewpath\n%%EOF\n"


MAP = "files: {train: ['*.jsonl']}\ncolumns: {prompt: q, image: i, answer: a}\n"


def prepared(source: Path, entry: Any, *options: str) -> int:
    source.mkdir(exist_ok=True)
    (source / "rows.jsonl").write_text(
        json.dumps({"q": "?", "i": entry, "a": "1"}) + "\n", encoding="utf-8"
    )
    (source.parent / "map.yaml").write_text(MAP, encoding="utf-8")
    out = str(source.parent / "out")
    return main(
        [
            "data",
            "prepare",
            "generic",
            "--from",
            str(source),
            "--out",
            out,
            "--map",
            str(source.parent / "map.yaml"),
            *options,
        ]
    )


def test_prepare_starts_no_program_for_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = tmp_path / "started"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\ntouch {started}\nexit 1\n", encoding="utf-8")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/p.eps").write_bytes(eps())
    assert prepared(tmp_path / "set", "p.eps") == 2
    assert "no readable image" in capsys.readouterr().err
    assert not started.exists()


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "GIF"])
def test_prepare_makes_other_formats_png(kind: str, tmp_path: Path) -> None:
    picture(tmp_path / "set/p.any", kind)
    assert prepared(tmp_path / "set", "p.any") == 0
    [made] = (tmp_path / "out/images").iterdir()
    assert Image.open(io.BytesIO(made.read_bytes()), formats=("PNG",)).size == (9, 9)


@pytest.mark.parametrize("entry", ["{private}", "../home/photo.png", "link.png"])
def test_prepare_copies_nothing_from_outside_the_data_set(
    entry: str, tmp_path: Path, private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/link.png").symlink_to(private)
    entry = entry.format(private=private)
    assert prepared(tmp_path / "set", entry) == 2
    assert "lies outside the data set; --images-root" in capsys.readouterr().err
    if entry != "link.png":
        assert prepared(tmp_path / "set", entry, "--images-root", str(private.parent)) == 0


def test_prepare_reads_the_links_of_the_hubs_cache(tmp_path: Path) -> None:
    blob = picture(tmp_path / "datasets--a--b/blobs/0123")
    source = tmp_path / "datasets--a--b/snapshots/rev"
    source.mkdir(parents=True)
    (source / "p.png").symlink_to(blob)
    assert prepared(source, "p.png") == 0
