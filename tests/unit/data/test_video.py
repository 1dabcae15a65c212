"""What ends ``data prepare`` where rows name videos: a library that is missing, and a disk that is
full.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from rayloop.cli import main
from rayloop.data.published.video import extract_frames
from tests.unit.data.test_published import written


def test_a_film_without_its_library_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    still = io.BytesIO()
    Image.new("RGB", (8, 8)).save(still, "PNG")
    written(tmp_path / "films/b/0.png", still.getvalue())
    written(tmp_path / "films/a.mp4", b"film")
    rows = [
        {"id": name, "question": "Q?", "answer": "A", "video": f"films/{name}.mp4"}
        for name in ("a", "b")
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    columns = b"columns: {videos: video, prompt: question, answer: answer}\n"
    written(tmp_path / "map.yaml", b"files: {train: [rows.json]}\n" + columns)
    given = [
        "--map",
        str(tmp_path / "map.yaml"),
        "--from",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["data", "prepare", "generic", *given]) == 2
    assert (
        'a.mp4 is a video, which PyAV takes apart: pip install "rayloop[video]"'
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out/train.jsonl").exists()


def test_a_full_disk_is_no_failure_of_the_film(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4"), "w") as film:
        stream = film.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(4):
            film.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 48)))))
        film.mux(stream.encode())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        extract_frames(tmp_path / "a.mp4", tmp_path / "out", 0.0, "row")
