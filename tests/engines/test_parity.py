"""``rayloop parity``: a sound engine passes, and each of ten faults is found where it begins."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayloop.chat.rendering import Renderer
from rayloop.cli import main
from rayloop.config.model import ModelSettings
from rayloop.core.protocols import Manifest
from rayloop.core.types import Completion, PromptImage, Sampling, TokenPrompt
from rayloop.engines.generation import decoding
from rayloop.engines.generation import transformers as transformers_engine
from rayloop.engines.generation.sampler import Sampler
from rayloop.engines.settings import EngineChoice, EnginePlace, build_engine
from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.measure.parity import LIMITS
from rayloop.parity import play
from rayloop.transports.manifest import manifest
from tests.engines.conftest import TEXTS
from tests.support.model_families import write

pytestmark = pytest.mark.timeout(900)

SHORT = ("--turns", "3", "--images", "1,2,4", "--depth", "200")
BEHIND = 0.1
"""How far from the limit a sound engine and a planted fault stay, as a factor."""


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With norms of queries and keys that differ, as trained ones do."""
    folder = write("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    noise = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=noise))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is its embedding."""
    return write_tiny_vlm(tmp_path_factory.mktemp("tied"), TEXTS, layers=2, vision_depth=2)


@dataclass
class Wrapped:
    """An engine whose prompts or weights are changed on the way in."""

    engine: Any
    prompt: Callable[[TokenPrompt], TokenPrompt] = lambda prompt: prompt
    weights: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda tensors: tensors

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        completion: Completion = await self.engine.generate(self.prompt(prompt), sampling)
        return completion

    async def load(self, sent: Manifest, tensors: Mapping[str, Tensor]) -> None:
        changed = self.weights(tensors)
        await self.engine.load(manifest(sent.version, changed), changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def wrap(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Have ``parity`` play with an engine that is wrapped."""

    def build(model: ModelSettings, settings: EngineChoice, place: EnginePlace) -> Any:
        return Wrapped(build_engine(model, settings, place), **changes)

    monkeypatch.setattr(play, "build_engine", build)


def mrope_off_by_one(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Text behind an image is one position further on."""
    original = decoding.positions

    def positions(model: Any, token_ids: Tensor, grids: Tensor) -> Tensor:
        rows = original(model, token_ids, grids).clone()
        places = (token_ids == model.config.image_token_id).nonzero()[:, 0]
        if len(places):
            rows[1:, int(places[-1]) + 1 :] += 1
        return rows

    monkeypatch.setattr(decoding, "positions", positions)


def images_in_another_order(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The first two, which have the same size, are exchanged."""

    def exchanged(prompt: TokenPrompt) -> TokenPrompt:
        images = list(prompt.images)
        images[:2] = images[:2][::-1]
        return dataclasses.replace(prompt, images=tuple(images))

    wrap(monkeypatch, prompt=exchanged)


def wrong_resize(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The nearest pixel in place of an interpolation."""
    renderer = Renderer(ModelSettings(path=str(folder)))

    def resized(image: PromptImage) -> PromptImage:
        assert image.data is not None
        size = renderer.resized(image.ref)
        if size == (image.ref.width, image.ref.height):
            return image
        file = io.BytesIO()
        with Image.open(io.BytesIO(image.data)) as picture:
            picture.resize(size, Image.Resampling.NEAREST).save(file, "PNG")
        data = file.getvalue()
        ref = dataclasses.replace(image.ref, sha256=hashlib.sha256(data).hexdigest())
        return PromptImage(ref, data)

    def changed(prompt: TokenPrompt) -> TokenPrompt:
        return dataclasses.replace(prompt, images=tuple(map(resized, prompt.images)))

    wrap(monkeypatch, prompt=changed)


def temperature_not_applied(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    class Untempered(Sampler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._temperature = torch.ones_like(self._temperature)

    monkeypatch.setattr(decoding, "Sampler", Untempered)


def stale_prefix_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Tokens that the engine has seen have the images that they had then."""
    cache: dict[tuple[int, ...], tuple[PromptImage, ...]] = {}

    def cached(prompt: TokenPrompt) -> TokenPrompt:
        images = prompt.images
        known = [tokens for tokens in cache if prompt.token_ids[: len(tokens)] == tokens]
        if known:
            old = cache[max(known, key=len)]
            images = old + images[len(old) :]
        cache[prompt.token_ids] = images
        return dataclasses.replace(prompt, images=images)

    wrap(monkeypatch, prompt=cached)


def missing_bos(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The first token of a prompt is left out."""
    wrap(
        monkeypatch,
        prompt=lambda prompt: dataclasses.replace(prompt, token_ids=prompt.token_ids[1:]),
    )


def tied_head_untied(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The head is another matrix than the embedding."""
    original = transformers_engine.load_model

    def untied(*arguments: Any, **options: Any) -> Any:
        model = original(*arguments, **options)
        noise = torch.Generator().manual_seed(0)
        head = model.lm_head.weight.detach()
        other = head + 0.1 * head.std() * torch.randn(head.shape, generator=noise)
        model.lm_head.register_forward_hook(lambda _, inputs, __: inputs[0] @ other.T)
        return model

    monkeypatch.setattr(transformers_engine, "load_model", untied)


def lora_scale(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The folder has adapters merged at alpha / rank = 2, the engine has them at 1."""

    def rescaled(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        noise = torch.Generator().manual_seed(0)
        changed = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith(("q_proj.weight", "v_proj.weight")):
                rows, columns = tensor.shape
                b = torch.randn(rows, 4, generator=noise)
                a = torch.randn(4, columns, generator=noise)
                changed[name] = tensor - 0.01 * b @ a
        return changed

    wrap(monkeypatch, weights=rescaled)


def swapped_norms(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Exchanges the norms of queries and keys."""

    def swapped(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            name: tensors[
                name.replace("q_norm", "k_norm")
                if "q_norm" in name
                else name.replace("k_norm", "q_norm")
            ]
            for name in tensors
        }

    wrap(monkeypatch, weights=swapped)


def other_chat_template(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Without the line break between an answer and the next question."""
    renderer = Renderer(ModelSettings(path=str(folder)))
    tokens = (*renderer.encode("\n"), renderer.prompt([]).token_ids[0], *renderer.encode("user"))

    def written(prompt: TokenPrompt) -> TokenPrompt:
        ids: list[int] = []
        for place, token in enumerate(prompt.token_ids):
            if prompt.token_ids[place : place + len(tokens)] != tokens:
                ids.append(token)
        return dataclasses.replace(prompt, token_ids=tuple(ids))

    wrap(monkeypatch, prompt=written)


SAMPLED_PLAYS = ["first", "repeat"]
ALL_PLAYS = [*SAMPLED_PLAYS, "greedy"]
FAULTS: dict[Any, tuple[str, int, list[str], str]] = {
    mrope_off_by_one: ("image", 1, ALL_PLAYS, "M-RoPE"),
    images_in_another_order: ("image", 2, ALL_PLAYS, "the order of images"),
    wrong_resize: (
        "image",
        3,
        ALL_PLAYS,
        "resized to 140x112); look at the resize",
    ),
    temperature_not_applied: (
        "turn",
        1,
        SAMPLED_PLAYS,
        "look at the temperature and the sampling mask: greedy tokens agree",
    ),
    stale_prefix_cache: (
        "image",
        1,
        ["repeat"],
        "look at the cache of prefixes: only the repeat differs",
    ),
    missing_bos: ("turn", 1, ALL_PLAYS, "a missing first token"),
    tied_head_untied: ("turn", 1, ALL_PLAYS, "tied heads"),
    lora_scale: ("turn", 1, ALL_PLAYS, "adapters"),
    swapped_norms: ("turn", 1, ALL_PLAYS, "norms"),
    other_chat_template: ("turn", 2, ALL_PLAYS, "look at the chat template of earlier turns"),
}
"""Fault -> what it begins with, and its number; the plays that differ there; what is said."""


def parity(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command."""
    code = main(["parity", *words, "--json"])
    output = capsys.readouterr()
    assert code in (0, 1), output.err
    content: dict[str, Any] = json.loads(output.out)
    return code, content


@pytest.mark.gpu_fake
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
def test_a_planted_fault_is_found_where_it_begins(
    fault: Any,
    qwen3_vl: Path,
    tied: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tied if fault is tied_head_untied else qwen3_vl
    fault(monkeypatch, folder)
    code, found = parity(capsys, str(folder), *SHORT)
    verdict = found["agreement"]
    begins, number, plays, words = FAULTS[fault]
    print(f"{fault.__name__}: {verdict['sentence']}")
    assert code == 1
    assert not verdict["agrees"]
    assert (verdict["begins"], verdict["number"]) == (begins, number), verdict["sentence"]
    assert verdict["plays"] == plays
    assert words in verdict["sentence"]


@pytest.mark.gpu_fake
@pytest.mark.parametrize("model", ["qwen3_vl", "tied"])
def test_a_sound_engine_passes(
    model: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = parity(capsys, str(request.getfixturevalue(model)), *SHORT)
    assert code == 0
    assert found["agreement"]["agrees"]
    assert found["agreement"]["blind"] == []
    total = found["total"]
    assert total["gap"]["largest"] < BEHIND * found["limit"]
    assert total["wrong_images"] > found["limit"]
    assert total["other_choices"] == 0
    assert total["greedy_tokens"] > 0
    assert total["theirs"] is None
    axes = [(row["axis"], row["turn"], row["images"]) for row in found["rows"]]
    assert axes == [
        *(("text", turn, 0) for turn in (1, 2, 3)),
        *(("images", 1, images) for images in (1, 2, 4)),
        *(("screens", turn, turn) for turn in (1, 2, 3)),
        ("depth", 1, 1),
    ]


def test_bfloat16_has_a_limit_of_its_own_which_a_fault_exceeds(
    qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(qwen3_vl), *SHORT, "--dtype", "bfloat16"]
    code, found = parity(capsys, *words)
    assert code == 0, found["agreement"]["sentence"]
    assert found["limit"] == LIMITS["bfloat16"]
    assert found["total"]["gap"]["mean"] > LIMITS["float32"], "it was computed in bfloat16"
    stale_prefix_cache(monkeypatch, qwen3_vl)
    code, found = parity(capsys, *words)
    assert code == 1
    verdict = found["agreement"]
    assert (verdict["begins"], verdict["number"], verdict["plays"]) == ("image", 1, ["repeat"])


# A case that travels -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case(qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A case of the sound engine."""
    file = tmp_path_factory.mktemp("case") / "case.json"
    assert main(["parity", str(qwen3_vl), *SHORT, "--save", str(file)]) == 0
    return file


def edited(case: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(case.read_text(encoding="utf-8"))
    change(content)
    file = folder / "edited.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def test_a_case_is_checked_elsewhere_without_playing(
    case: Path, qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(play, "build_engine")
    capsys.readouterr()
    code, found = parity(capsys, str(qwen3_vl), "--check", str(case))
    assert code == 0
    assert found["origin"]["engine"] == "transformers"
    assert len(found["rows"]) == 10
    assert found["total"]["gap"]["largest"] < BEHIND * found["limit"]
    text = case.read_text(encoding="utf-8")
    assert str(qwen3_vl.parent) not in text
    assert str(Path.home()) not in text


def test_another_trainer_s_log_probs_are_a_third_column(
    case: Path, qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer of somebody who computes 0.01 nats too much."""

    def add(content: dict[str, Any]) -> None:
        content["trainer_logprobs"] = []
        for episode in content["episodes"]:
            turns = [turn["logprobs"] or () for turn in episode["trajectory"]["turns"]]
            numbers = [value + 0.01 for value in chain.from_iterable(turns)]
            content["trainer_logprobs"].append(numbers)

    file = edited(case, tmp_path, add)
    code, found = parity(capsys, str(qwen3_vl), "--check", str(file))
    assert code == 0, "the other trainer does not change the verdict on the engine"
    assert found["total"]["theirs"]["mean"] == pytest.approx(0.01, abs=1e-5)
    assert main(["parity", str(qwen3_vl), "--check", str(file)]) == 0
    table = capsys.readouterr().out.splitlines()
    rows = [line for line in table if line.startswith(("text", "images", "screens", "depth"))]
    assert len(rows) == 10
    assert all(row.endswith(" 1.0e-02") for row in rows)


def first_token(content: dict[str, Any]) -> None:
    content["episodes"][0]["trajectory"]["turns"][0]["token_ids"][0] += 1


def image(content: dict[str, Any]) -> None:
    images = content["episodes"][1]["trajectory"]["image_bytes"]
    images[next(iter(images))] = "AAAA"


def dtype(content: dict[str, Any]) -> None:
    content["origin"]["dtype"] = "float64"


def short(content: dict[str, Any]) -> None:
    content["trainer_logprobs"] = [[-1.0]] * len(content["episodes"])


def foreign(content: dict[str, Any]) -> None:
    content["format"] = "another"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (first_token, "was edited: only trainer_logprobs may be filled in. Copy it again"),
        (image, "was edited"),
        (dtype, "is not a case of --save: 1 validation error for CaseFile origin.dtype"),
        (short, "trainer_logprobs needs a list for each of 18 episodes, of as many numbers as"),
        (foreign, "is not a case of --save: 1 validation error for CaseFile format"),
    ],
)
def test_an_edited_case_is_refused(
    change: Callable[[dict[str, Any]], None],
    why: str,
    case: Path,
    qwen3_vl: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    file = edited(case, tmp_path, change)
    assert main(["parity", str(qwen3_vl), "--check", str(file)]) == 2
    output = capsys.readouterr()
    assert why in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


def test_a_case_of_another_model_is_refused_or_named(
    case: Path, tiny_text: Path, tied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["parity", str(tiny_text), "--check", str(case)]) == 2
    output = capsys.readouterr()
    assert re.search(r"--check: \S+ is not a case of text\d: .*no vision tower", output.err)
    assert output.out == ""
    # The tokens of this one mean the same.
    code, found = parity(capsys, str(tied), "--check", str(case))
    assert code == 1
    assert re.match(r"played by qwen3_vl\d, scored by tied\d with \{'rayloop'", found["notes"][0])


# A model without sight ---------------------------------------------------------------------------


def test_a_blind_model_is_said_to_be_blind(
    qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "blind"
    shutil.copytree(qwen3_vl, folder)
    tensors = load_file(folder / "model.safetensors")
    blind = {
        name: torch.zeros_like(tensor) if "visual." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(blind, folder / "model.safetensors", metadata={"format": "pt"})
    code, found = parity(capsys, str(folder), *SHORT)
    assert code == 0
    assert len(found["agreement"]["blind"]) == 7
    assert main(["parity", str(folder), *SHORT]) == 0
    assert "the model is blind: other images change nothing" in capsys.readouterr().out


# What is written, and what is refused -------------------------------------------------------------


def test_the_row_without_the_table_is_added_to_a_file(
    tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    for _ in range(2):
        words = ["--turns", "1", "--depth", "", "--out", str(file)]
        assert main(["parity", str(tiny_text), *words]) == 0
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2
    assert rows[0]["family"] == "qwen2"
    assert rows[0]["total"]["wrong_images"] is None
    assert "rows" not in rows[0]
    assert "they agree in every row" in capsys.readouterr().out


def test_a_context_that_is_too_short_leaves_turns_out(
    tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(tiny_text, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 150
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, found = parity(capsys, str(folder), "--turns", "8", "--depth", "")
    assert code == 0
    assert [row["turn"] for row in found["rows"]] == list(range(1, len(found["rows"]) + 1))
    missing = 8 - len(found["rows"])
    assert missing > 0
    assert found["notes"] == [f"left out: {missing} of the turns of text, beyond 150 tokens"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "MODEL: nowhere is neither a folder here nor a name on the Hub"),
        (["{model}", "--check", "absent.json"], "No such file or directory: 'absent.json'"),
        (["{empty}"], "has no chat template"),
        (["{model}", "--engine", "sglang"], "No module named 'sglang'"),
        (["{model}", "--turns", "1", "--depth", "", "--save", "absent/case"], "absent/"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    words: list[str],
    why: str,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"model": str(tiny_text), "empty": "empty"}
    assert main(["parity", *(word.format(**places) for word in words)]) == 2
    output = capsys.readouterr()
    assert why in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--engine", "vlm"], "argument --engine: vlm: expected http://host:port/v1"),
        (["--against", "host:8000"], "argument --against: host:8000: expected http://host:port/v1"),
        (["--images", "1,two"], "argument --images: invalid numbers value: '1,two'"),
        (["--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
    ],
)
def test_an_option_with_another_value_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["parity", "model", *words])
    assert end.value.code == 2
    assert why in capsys.readouterr().err


def test_a_log_prob_that_is_not_a_number_is_named(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            name: tensor * np.nan if name == "model.norm.weight" else tensor
            for name, tensor in tensors.items()
        }

    wrap(monkeypatch, weights=damaged)
    assert main(["parity", str(tiny_text), "--turns", "1", "--depth", ""]) == 1
    assert "LogprobMismatch: nothing can be compared" in capsys.readouterr().err
