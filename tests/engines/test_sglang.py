"""The SGLang adapter against the Python files of the release that it is written for: what it passes
exists there.
"""

from __future__ import annotations

import ast
import asyncio
import io
import pickle
import subprocess
import sys
import types
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rayloop.core.failures import DataFailure, WeightSyncError, WorkerLost
from rayloop.core.types import FinishReason, Sampling, TokenPrompt, Version
from rayloop.data.images import decode
from rayloop.engines.generation import sglang, sglang_worker
from rayloop.engines.settings import EnginePlace, ModelSettings, SglangEngineSettings
from rayloop.transports.manifest import manifest
from tests.engines.prompts import image

ADAPTER = ast.parse(Path(sglang.__file__).read_text(encoding="utf-8"))
MODEL, SETTINGS = ModelSettings(path="model"), SglangEngineSettings()
SAMPLING = Sampling(0.8, 12, 2, ("</a>",), (5,), (7, 9))
PROMPT = TokenPrompt((1, 2, 3))
STOPPED = {"type": "stop", "matched": 5}


def answer(
    logprobs: list[float],
    finish: dict[str, object] = STOPPED,
    read: tuple[int, ...] = PROMPT.token_ids,
) -> dict[str, Any]:
    """SGLang's, to ``PROMPT``: tokens 11 and 5."""
    tokens = [(logprob, token, None) for logprob, token in zip(logprobs, (11, 5), strict=False)]
    meta = {"finish_reason": finish, "prompt_tokens": len(read), "output_token_logprobs": tokens}
    return {"meta_info": meta, "prompt_token_ids": list(read)}


def test_what_is_sent() -> None:
    assert sglang.arguments(
        MODEL, SglangEngineSettings(extra={"tp_size": 2, "dtype": "float16"})
    ) == {
        "model_path": "model",
        "dtype": "float16",
        "sampling_defaults": "openai",
        "tp_size": 2,
        "custom_weight_loader": [
            f"rayloop.engines.generation.sglang_worker.{name}" for name in ("take", "forget")
        ],
        "mm_process_config": {
            "image": {"min_pixels": MODEL.min_pixels, "max_pixels": MODEL.max_pixels}
        },
    }
    assert sglang.parameters(TokenPrompt((1,), seed=3), SAMPLING) == {
        "temperature": 0.8,
        "max_new_tokens": 12,
        "min_new_tokens": 2,
        "stop": ["</a>"],
        "stop_token_ids": [5],
        "logit_bias": {"7": -1e9, "9": -1e9},
        "sampling_seed": 3,
        "skip_special_tokens": False,
    }
    near_the_end = sglang.parameters(TokenPrompt((1,)), Sampling(max_tokens=3, min_tokens=8))
    assert near_the_end["min_new_tokens"] == 3, "SGLang refuses a minimum above the maximum"
    small, large = image(28, 28), image(56, 56)
    asked = TokenPrompt((1, 2, 2, 2, 2, 2, 3, 3, 2, 4), (large, small, small))
    assert sglang.collapsed(asked, image_token=2) == [1, 2, 2, 3, 3, 2, 4]
    assert sglang.collapsed(TokenPrompt((1, 2, 2)), image_token=None) == [1, 2, 2]
    with pytest.raises(DataFailure, match="5 image tokens, but its 1 images need 1"):
        sglang.collapsed(TokenPrompt(asked.token_ids[:6], (small,)), image_token=2)


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ({"type": "stop", "matched": 5}, FinishReason.END_TOKEN),
        ({"type": "stop", "matched": "</a>"}, FinishReason.STOP_STRING),
        ({"type": "length", "length": 2}, FinishReason.LENGTH),
    ],
)
def test_what_comes_back(finish: dict[str, object], expected: FinishReason) -> None:
    found = sglang.completion(answer([-0.5, -1.5], finish), Version(0, 3), PROMPT)
    assert (found.token_ids, found.logprobs, found.version) == (
        (11, 5),
        (-0.5, -1.5),
        Version(0, 3),
    )
    assert found.finish is expected


def test_an_aborted_turn_is_asked_for_elsewhere() -> None:
    with pytest.raises(WorkerLost, match="'type': 'abort'"):
        sglang.completion(answer([], {"type": "abort", "message": "x"}), Version(0, 0), PROMPT)


@pytest.mark.parametrize("read", [(1, 2, 2, 3), (1, 2, 4)])
def test_a_prompt_that_was_tokenized_anew_is_not_trained_on(read: tuple[int, ...]) -> None:
    """As many other tokens are other tokens, too."""
    with pytest.raises(
        DataFailure, match=rf"SGLang read other tokens \({len(read)}\) than the 3 that were sent"
    ):
        sglang.completion(answer([-0.5], read=read), Version(0, 0), PROMPT)


class Manager:
    """SGLang's tokenizer manager: prepares a request while ``preparing`` is unset, then gives it to
    the scheduler.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.preparing, self.faults = asyncio.Event(), list[Exception]()

    async def generate_request(self, request: Any, http: None) -> AsyncIterator[dict[str, Any]]:
        await self.preparing.wait()
        await self._send_one_request(request)
        yield answer([-0.5])

    async def _send_one_request(self, request: Any) -> None:
        self.log.append("added")

    async def pause_generation(self, request: Any) -> None:
        if self.faults:
            raise self.faults.pop()
        self.log.append("paused")

    async def continue_generation(self, request: Any) -> None:
        self.log.append("resumed")

    def abort_request(self, rid: str) -> None:
        self.log.append("aborted")


@pytest.fixture
def engine(tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter around a manager that stands for SGLang's."""
    names = ("GenerateReqInput", "PauseGenerationReqInput", "ContinueGenerationReqInput")
    package: Any = types.ModuleType("sglang")
    package.__version__, package.Engine = (
        sglang.TESTED,
        lambda **_: types.SimpleNamespace(tokenizer_manager=Manager()),
    )
    requests: Any = types.ModuleType("sglang.srt.managers.io_struct")
    vars(requests).update(dict.fromkeys(names, types.SimpleNamespace))
    for module in (package, requests):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made: Any = sglang.SglangEngine(ModelSettings(path=str(tiny_text)), SETTINGS, EnginePlace())
    made._version = Version(0, 0)
    return made


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class FeatureCache:
    """SGLang's, of what the vision tower made of images."""

    def __init__(self) -> None:
        self.kept = {7: "features of the old weights"}

    def clear(self) -> None:
        self.kept.clear()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of SGLang's scheduler that has the cache."""
    schedule, managers = (
        types.ModuleType("sglang.srt.managers.mm_schedule"),
        types.ModuleType("sglang.srt.managers"),
    )
    schedule.embedding_cache = FeatureCache()  # type: ignore[attr-defined]
    managers.mm_schedule = schedule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, schedule.__name__, schedule)
    monkeypatch.setitem(sys.modules, managers.__name__, managers)
    return schedule


@pytest.mark.parametrize("broken", [False, True])
def test_image_features_of_old_weights_are_dropped_with_a_broadcast(
    broken: bool, scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it fails: a part of the weights may be new."""
    receiver = types.SimpleNamespace(stream=lambda version, meeting: iter([("a", torch.zeros(1))]))
    monkeypatch.setattr(sglang_worker, "_RECEIVERS", [receiver])

    def load(weights: Iterator[Any]) -> None:
        if broken:
            raise ValueError("no such layer")
        assert [name for name, _ in weights] == ["a"]

    packed = pickle.dumps((Version(0, 1), pickle.dumps(("settings", "meeting")), str(tmp_path)))
    sglang_worker.take(
        types.SimpleNamespace(load_weights=load),
        [("", torch.frombuffer(bytearray(packed), dtype=torch.uint8))],
    )
    [file] = tmp_path.iterdir()
    assert isinstance(pickle.loads(file.read_bytes()), WeightSyncError) is broken
    assert scheduler.embedding_cache.kept == {}
    scheduler.embedding_cache = None  # a server without such a cache
    sglang_worker.forget()


def test_image_features_of_old_weights_are_dropped_with_whole_tensors(
    engine: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    async def update(request: Any) -> tuple[bool, str]:
        sent.append(request)
        return True, ""

    async def fine(request: Any = None) -> Any:
        return types.SimpleNamespace(success=True, message="")

    async def flush() -> Any:
        return types.SimpleNamespace(success=True)

    manager, requests = engine._manager, sys.modules["sglang.srt.managers.io_struct"]
    for name in (
        "BeginWeightUpdateReqInput",
        "EndWeightUpdateReqInput",
        "UpdateWeightsFromTensorReqInput",
    ):
        monkeypatch.setattr(requests, name, types.SimpleNamespace, raising=False)
    utils: Any = types.ModuleType("sglang.srt.utils")
    utils.MultiprocessingSerializer = types.SimpleNamespace(serialize=lambda tensors: tensors)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    manager.update_weights_from_tensor, manager.flush_cache = update, flush
    manager.begin_weight_update = manager.end_weight_update = fine
    monkeypatch.setattr(sglang, "_check", lambda version, answer: None)
    engine._settings = SglangEngineSettings(extra={"device": "cpu"})
    tensors = {name: torch.zeros(1) for name in engine._names}
    asyncio.run(engine.load(manifest(Version(0, 1), tensors), tensors))
    *weights, last = sent
    assert len(weights) >= 1
    assert last.load_format == sglang_worker.FORGET
    [part] = last.serialized_named_tensors
    sglang_worker.forget(None, pickle.loads(part))
    assert scheduler.embedding_cache.kept == {}


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_request_in_preparation_is_in_before_the_weights_change(
    engine: Any, cancelled: bool
) -> None:
    """It would else carry the version of the old weights and run under the new ones.

    One that dies does not hold the pause.
    """

    async def test() -> None:
        async with asyncio.timeout(20):
            asked = asyncio.create_task(engine.generate(PROMPT, Sampling()))
            await settle()
            pausing = asyncio.create_task(engine.pause())
            await settle()
            assert engine._manager.log == []
            asked.cancel() if cancelled else engine._manager.preparing.set()
            await pausing
            engine._version = Version(0, 1)
            await engine.resume()
            if not cancelled:
                assert (await asked).version == Version(0, 0)

    asyncio.run(test())
    assert engine._manager.log == [*(["aborted"] if cancelled else ["added"]), "paused", "resumed"]


def test_a_pause_that_fails_lets_those_go_on_that_wait_for_its_end(engine: Any) -> None:
    async def test() -> None:
        async with asyncio.timeout(20):
            engine._manager.preparing.set()
            engine._manager.faults = [WorkerLost("the scheduler is gone")]
            with pytest.raises(WorkerLost):
                await engine.pause()
            await engine.generate(PROMPT, Sampling())

    asyncio.run(test())


def test_an_image_is_sent_in_the_size_in_which_the_model_sees_it() -> None:
    odd = image(100, 45)
    with Image.open(io.BytesIO(sglang.sent(odd, 14))) as shown:
        assert (shown.format, shown.size) == ("PNG", (14 * odd.ref.grid[2], 14 * odd.ref.grid[1]))
        assert shown.size != (100, 45)
    even = image(56, 28)
    with Image.open(io.BytesIO(sglang.sent(even, 14))) as shown:
        assert shown.tobytes() == decode(even.data or b"").tobytes(), "nothing is lost on the way"


def test_a_weight_update_that_lacks_tensors_is_refused_before_sglang_has_it(
    tiny_text: Path,
) -> None:
    wanted = sglang.names(tiny_text, tied=True)
    tensors = {name: torch.zeros(1) for name in wanted}
    assert "lm_head.weight" not in wanted
    assert len(wanted) > 10
    engine: Any = object.__new__(sglang.SglangEngine)
    engine._names = wanted
    del tensors["model.norm.weight"]
    with pytest.raises(
        WeightSyncError, match=r"0.1 lacks 1 tensors of the engine's model: model.norm.weight"
    ):
        asyncio.run(engine.load(manifest(Version(0, 1), tensors), tensors))


def test_an_engine_has_the_gpus_that_it_is_spread_over_in_one_node() -> None:
    def wrong(gpus: float, **extra: int) -> list[str]:
        return list(SglangEngineSettings(extra=dict(extra)).problems(gpus, 100))

    assert wrong(1) == wrong(0.5) == wrong(0) == wrong(4, tp_size=2, pp_size=2) == []
    assert "tp_size x pp_size is 2 and rollout.placement.num_gpus is 1" in wrong(1, tp_size=2)[0]
    assert "nnodes above 1" in wrong(8, tp_size=8, nnodes=2)[0]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The release's wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--retries",
        "0",
        "-d",
        str(folder),
    ]
    done = subprocess.run(
        [*download, f"sglang=={sglang.TESTED}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode:
        pytest.skip(
            f"the wheel of sglang {sglang.TESTED} cannot be had here:"
            f" {done.stderr.splitlines()[-1:]}"
        )
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def classes(wheel: zipfile.ZipFile, file: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(wheel.read(f"sglang/srt/{file}"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def fields(found: dict[str, ast.ClassDef], name: str) -> set[str]:
    """The annotated fields of a class and of its bases in the same file."""
    own = {
        item.target.id
        for item in found[name].body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    bases = [
        base.id for base in found[name].bases if isinstance(base, ast.Name) and base.id in found
    ]
    return own.union(*(fields(found, base) for base in bases))


def calls() -> list[tuple[str, set[str]]]:
    """The adapter's calls of names and methods, with their keywords."""
    found = []
    for node in ast.walk(ADAPTER):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            found.append((name, {keyword.arg for keyword in node.keywords if keyword.arg}))
    return found


@pytest.mark.slow
def test_requests_have_the_fields_that_are_passed(wheel: zipfile.ZipFile) -> None:
    requests = classes(wheel, "managers/io_struct.py")
    passed = [(name, keywords) for name, keywords in calls() if name.endswith("ReqInput")]
    assert {name for name, _ in passed} == {
        "GenerateReqInput",
        "PauseGenerationReqInput",
        "ContinueGenerationReqInput",
        "BeginWeightUpdateReqInput",
        "UpdateWeightsFromTensorReqInput",
        "EndWeightUpdateReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
    }
    for name, keywords in passed:
        assert keywords <= fields(requests, name), name
    mode = next(i for i in requests["PauseGenerationReqInput"].body if isinstance(i, ast.AnnAssign))
    assert "'retract'" in ast.unparse(mode.annotation)


@pytest.mark.slow
def test_engine_and_sampling_arguments_exist(wheel: zipfile.ZipFile) -> None:
    sampling = fields(classes(wheel, "sampling/sampling_params.py"), "SamplingParams")
    assert sglang.parameters(TokenPrompt((1,)), SAMPLING).keys() <= sampling
    server = set()
    for file in wheel.namelist():
        if file.startswith("sglang/srt/arg_groups/fields/") and file.endswith(".py"):
            found = classes(wheel, file.removeprefix("sglang/srt/"))
            server |= {field for name in found for field in fields(found, name)}
    assert {"tp_size", *sglang.arguments(MODEL, SETTINGS)} <= server


@pytest.mark.slow
def test_the_tokenizer_manager_has_the_methods_that_are_called(wheel: zipfile.ZipFile) -> None:
    methods: dict[str, ast.AST] = {}
    for file, name in [
        ("tokenizer_manager", "TokenizerManager"),
        ("tokenizer_control_mixin", "TokenizerControlMixin"),
    ]:
        methods |= {
            m.name: m
            for m in classes(wheel, f"managers/{file}.py")[name].body
            if hasattr(m, "name")
        }
    called = {
        node.func.attr
        for node in ast.walk(ADAPTER)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self._manager"
    }
    assert (
        {"generate_request", "pause_generation", "update_weights_from_tensor", "flush_cache"}
        <= called
        <= methods.keys()
    )
    assert all(
        isinstance(methods[name], ast.AsyncFunctionDef) for name in called - {"abort_request"}
    )
