"""What is read from a model folder, and what ``export`` writes: the model that its files say, and
nothing that was left there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rayloop.cli import main
from rayloop.core.failures import ConfigError
from rayloop.core.model_files import INDEX, WHOLE_MODEL, Resolved
from rayloop.engines.adapters import merge_adapters
from rayloop.engines.generation.sglang import names
from rayloop.engines.models import load_model
from rayloop.engines.models.saving import save_model
from rayloop.engines.settings import ModelSettings
from rayloop.engines.shape import ModelSource
from rayloop.engines.tiny_vlm import write_tiny_vlm
from tests.support.models import TEXTS

IDS = torch.arange(10)[None] + 20
LAYERS = ["q_proj", "v_proj", "down_proj"]


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def sharded(tiny_text: Path, tmp_path: Path) -> Path:
    """A model in several files, with an index."""
    folder = tmp_path / "sharded"
    loaded(tiny_text).save_pretrained(folder, max_shard_size="100KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_text / name, folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def add_leftover(folder: Path) -> None:
    """A file of an earlier save, last by its name, with other values and a tensor that the model
    does not have.
    """
    old = {
        name: value + 1
        for name, value in load_file(sorted(folder.glob("*.safetensors"))[0]).items()
    }
    save_file(
        {**old, "model.layers.9.mlp.up_proj.weight": torch.zeros(3, 3)},
        folder / "model-00099-of-00099.safetensors",
    )


def test_what_the_index_does_not_name_is_not_the_models(sharded: Path, tmp_path: Path) -> None:
    want, shape, known = (
        loaded(sharded).state_dict(),
        ModelSource(str(sharded)).shape,
        names(sharded, tied=False),
    )
    add_leftover(sharded)
    assert main(["export", str(sharded), str(tmp_path / "out")]) == 0
    got = loaded(tmp_path / "out").state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert (ModelSource(str(sharded)).shape, names(sharded, tied=False)) == (shape, known)


def change_index(folder: Path, **places: str) -> None:
    file = folder / INDEX
    index = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(
        json.dumps({**index, "weight_map": {**index["weight_map"], **places}}), encoding="utf-8"
    )


def test_a_tensor_that_a_file_of_the_model_has_beyond_the_index_is_left_out(
    sharded: Path, tmp_path: Path
) -> None:
    file = sorted(sharded.glob("*.safetensors"))[0]
    save_file({**load_file(file), "extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    assert main(["export", str(sharded), str(tmp_path / "out")]) == 0
    assert "extra.weight" not in load_file(tmp_path / "out" / WHOLE_MODEL)


def test_missing_tensors_and_files_are_errors(sharded: Path, tmp_path: Path) -> None:
    change_index(sharded, **{"model.norm.bias": sorted(sharded.glob("*.safetensors"))[0].name})
    with pytest.raises(
        ConfigError, match=r"lacks 1 tensor of the model, first model\.norm\.bias in model-00001"
    ):
        Resolved(sharded).stored()
    assert main(["export", str(sharded), str(tmp_path / "out")]) == 2
    change_index(sharded, **{"model.norm.bias": "gone.safetensors"})
    with pytest.raises(ConfigError, match=r"first model\.norm\.bias in gone\.safetensors"):
        load_model(ModelSettings(path=str(sharded)))
    (sharded / INDEX).write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is not an index of weights \(KeyError: 'weight_map'\)"):
        Resolved(sharded).stored()


def test_a_folder_that_means_two_models_is_refused(
    sharded: Path, tiny_text: Path, tmp_path: Path
) -> None:
    both = shutil.copytree(sharded, tmp_path / "both")
    shutil.copy(tiny_text / WHOLE_MODEL, both)
    with pytest.raises(
        ConfigError,
        match=r"holds two models, model\.safetensors and the files that model\.safetensors\.index",
    ):
        load_model(ModelSettings(path=str(both)))
    twice = shutil.copytree(sharded, tmp_path / "twice")
    first, second, *_ = sorted(twice.glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second, {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"\S+ is in model-00001\S+ and in model-00002\S+; remove one"
    ):
        load_model(ModelSettings(path=str(twice)))
    adapted = shutil.copytree(sharded, tmp_path / "adapted")
    (adapted / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds a model and peft's adapter_config\.json"):
        load_model(ModelSettings(path=str(adapted)))


def test_weights_of_other_formats_are_not_written_beside_the_new_ones(
    tiny_text: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_text, tmp_path / "source")
    for name in (
        "pytorch_model.bin",
        "consolidated.00.pth",
        "pytorch_model.bin.index.json",
        "old.gguf",
        "adapter_config.json",
    ):
        (source / name).write_text("{}", encoding="utf-8")
    save_model(source, tmp_path / "out", load_file(tiny_text / WHOLE_MODEL))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in tiny_text.iterdir()
    }


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vlm(tmp_path_factory.mktemp("tied"), TEXTS, vision=False, tied=True, layers=2)


@pytest.mark.filterwarnings("ignore")  # peft's own, of tied weights
@pytest.mark.parametrize(
    ("settings", "stays_tied"),
    [
        ({"target_modules": LAYERS}, True),
        ({"target_modules": [*LAYERS, "lm_head"]}, False),
        ({"target_modules": [*LAYERS, "embed_tokens"]}, False),
        ({"target_modules": [*LAYERS, "embed_tokens", "lm_head"]}, False),
        ({"target_modules": [*LAYERS, "lm_head"], "ensure_weight_tying": True}, None),
        ({"target_modules": LAYERS, "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": LAYERS, "modules_to_save": ["embed_tokens"]}, None),
        (
            {"target_modules": LAYERS, "trainable_token_indices": {"embed_tokens": [3, 25, 26]}},
            None,
        ),
    ],
    ids=str,
)
def test_adapters_on_shared_weights_answer_as_in_peft(
    settings: dict[str, Any], stays_tied: bool | None, tied: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(loaded(tied), LoraConfig(r=4, **settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        want = adapted(IDS).logits
    adapted.save_pretrained(tmp_path / "adapters")
    assert main(["export", str(tmp_path / "adapters"), str(tmp_path / "out")]) == 0
    out = loaded(tmp_path / "out")
    with torch.no_grad():
        assert (out(IDS).logits - want).abs().max() < 1e-4
        assert (loaded(tied)(IDS).logits - want).abs().max() > 1e-2, "the adapters say something"
    if stays_tied is not None:
        assert AutoConfig.from_pretrained(tmp_path / "out").tie_word_embeddings is stays_tied
        assert ("lm_head.weight" in load_file(tmp_path / "out" / WHOLE_MODEL)) is not stays_tied


def test_a_merge_that_changes_the_answers_is_refused(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    adapted = get_peft_model(
        loaded(tied), LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapters")
    monkeypatch.setattr(
        PeftModel, "merge_and_unload", lambda self, **_: self.unload(), raising=False
    )
    with pytest.raises(
        ConfigError,
        match=r"cannot be merged: the merged model's logits differ from the adapted one's by",
    ):
        merge_adapters(tmp_path / "adapters")


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_resized_base_say_what_to_resize(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model

    base = loaded(tied)
    rows = base.get_input_embeddings().weight.shape[0] + 7
    base.resize_token_embeddings(rows)
    get_peft_model(base, LoraConfig(r=4, target_modules=LAYERS)).save_pretrained(
        tmp_path / "adapters"
    )
    assert main(["export", str(tmp_path / "adapters"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"resize_token_embeddings({rows})" in said
    assert "Traceback" not in said
    assert "adapter_config.json" in said
