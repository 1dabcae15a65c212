"""PyVision-RL's and DeepEyes' own code beside ours: rewards, reading of turns, tools, results and
prompts. ``python -m tests.originals.test_pyvision --write`` writes what the originals pay for
tests/unit/recipes/test_original_scores.py.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import ImageSource, Message, Task, Trajectory
from rayloop.envs.interpreter import text as interpreter
from rayloop.recipes.pyvision.data import QuestionRows, published_text
from rayloop.recipes.pyvision.deepeyes import DeepEyesReward
from rayloop.recipes.pyvision.reward import PyVisionReward
from rayloop.recipes.pyvision.toolbox import VisualToolBoxV2
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from tests.support.originals import module, needs_originals, source

PYVISION, DEEPEYES = "agents-x-project/PyVision-RL", "Visual-Agent/DeepEyes"
SCORES, ENVS = "verl_agents/verl/utils/reward_score", "verl_agents/verl/workers/agent/envs/agents_x"
DATASET = "verl_agents/verl/utils/dataset"
PUBLISHED = ("multi_task_verifier", "general_verifier", "vl_agent")
FUNCTIONS = (*PUBLISHED, "compute_score", "compute_score_math")
CASES, KEPT = 12_000, 400
EXPECTED = Path(__file__).parents[1] / "data/originals/pyvision.json"
RAISED = "raised"
SOURCES = (
    "deepeyes",
    "vstar",
    "ecd",
    "longvila",
    "chart",
    "unknown",
    "vsi_numerical",
    "x_rule_verifiable",
    "geoguessr",
    "mathvista",
)
NUMBERS = ("vsi_numerical", "x_rule_verifiable")
BODIES = (
    "A",
    "B",
    "7",
    "red",
    "",
    " x ",
    "3.5",
    "-2",
    "1,000",
    "a\nb",
    "\\frac{1}{2}",
    "{x}",
    "yes",
    "ünï",
    "<answer>",
    "\\boxed{3}",
    "<interpreter>",
    "}\n</answer>",
    "x" * 999,
    "x" * 1000,
    "y" * 1200,
    "0",
    "50%",
    "1e3",
    "{7}",
)
FORMS = (
    "<answer>\n\\boxed{@}\n</answer>",
    "<answer>\n\\boxed{@}\n</answer>",
    "<answer>\\boxed{@}</answer>",
    "<answer>@</answer>",
    "<answer>\n@\n</answer>",
    "\\boxed{@}",
    "<think>",
    "</think>",
    "<think>thought</think>",
    "<answer>",
    "</answer>",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>",
    "<|vision_start|>",
    "<|image_pad|><|vision_end|>",
    "<interpreter>out 42</interpreter>",
    "<interpreter>",
    "</interpreter>",
    "<code>\n```python\nprint(1)\n```\n</code>",
    "text 3 ",
    "\n",
    "-.5",
    "+7",
    "..",
    "\u0663",
)


@dataclass(frozen=True)
class Case:
    """A transcript with its truth, source and number of calls."""

    text: str
    truth: Any
    source: str
    calls: int


def cases(count: int, seed: int = 14) -> Iterator[Case]:
    rng = random.Random(seed)
    for _ in range(count):
        text = "".join(
            rng.choice(FORMS).replace("@", rng.choice(BODIES)) for _ in range(rng.randint(0, 6))
        )
        truth = rng.choice(["7", "red", "-2", "0", "3.5", 7, 0, "B", "none"])
        yield Case(text, truth, rng.choice(SOURCES), rng.randint(0, 4))


def verdict(answer: str) -> bool:
    """A judge whose opinion is a hash of the answer."""
    found = 5
    for character in answer.strip():
        found = (found * 33 + ord(character)) % 1009
    return found % 2 == 1


class Hashing:
    """That judge as a reward source."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        found = re.search(r"<answer>\n\\boxed\{(.*)\}\n</answer>", context.texts[-1], re.DOTALL)
        assert found is not None
        return Scored(float(verdict(found[1])))


class Always:
    """A judge to whom everything is right."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        return Scored(1.0)


class Equal:
    """In place of math-verify, on both sides."""

    def same(self, first: str, second: str) -> bool:
        return first == second


JUDGE = {
    "use": f"{__name__ if __name__ != '__main__' else 'tests.originals.test_pyvision'}:Hashing"
}


def ours(function: str) -> Callable[[Case], Any]:
    """What ``variant: original`` pays for a case."""
    math = function == "compute_score_math"
    settings = {"variant": "original", "accuracy": JUDGE}
    if function in PUBLISHED:
        reward: Any = PyVisionReward(
            PyVisionReward.Settings.model_validate({**settings, "published": function})
        )
    else:
        reward = DeepEyesReward(DeepEyesReward.Settings.model_validate(settings))
        reward._verifiers.__dict__["math"] = Equal()
    runner = asyncio.Runner()

    def paid(case: Case) -> Any:
        name = case.source if function in PUBLISHED else "thinklite_eureka" if math else "deepeyes"
        truth = case.truth if function in PUBLISHED else str(case.truth)
        task = Task("t", (Message("user", ("Q?",)),), truth, name)
        played = replace(EMPTY_TRAJECTORY, env_result=float(case.calls))
        found = reward.score(played, task, ScoreContext(0, [case.text], transcript=case.text))
        outcome = runner.run(found) if asyncio.iscoroutine(found) else found
        assert isinstance(outcome, Scored)
        return RAISED if RAISED in outcome.flags else outcome.value

    return paid


class _Chat:
    def create(self, **asked: Any) -> Any:
        content = asked["messages"][-1]["content"]
        if "[Model_answer] :" in content:
            said = (
                "Judgement:"
                f" {int(verdict(content.rsplit('[Model_answer] :', 1)[1].rsplit('Judgement:', 1)[0]))}"
            )
        elif "[response]:" in content:
            right = verdict(
                content.split("[response]:", 1)[1].split("Your judgement must be", 1)[0]
            )
            said = f"correct: {'yes' if right else 'no'}"
        else:
            said = (
                "## Equivalence"
                f" Judgement\n{str(verdict(content.rsplit('## Student Final Answer', 1)[1])).upper()}"
            )
        return types.SimpleNamespace(
            choices=[types.SimpleNamespace(message=types.SimpleNamespace(content=said))]
        )


class _Client:
    def __init__(self, **_: Any) -> None:
        self.chat = types.SimpleNamespace(completions=_Chat())
        self.models = types.SimpleNamespace(
            list=lambda: types.SimpleNamespace(data=[types.SimpleNamespace(id="m")])
        )


class _Requests:
    @staticmethod
    def get(*_: Any, **__: Any) -> Any:
        return types.SimpleNamespace(json=lambda: {"data": [{"id": "m"}]})


def scoring(repository: str, path: str) -> types.ModuleType:
    """A file of reward functions whose judge is ``verdict`` and whose math-verify is equality."""
    given = {"OpenAI": _Client, "requests": _Requests, "parse": str, "verify": lambda a, b: a == b}
    cut = {
        line: ""
        for line in source(repository, path).splitlines()
        if re.match(r"(from (openai|math_verify) |import requests)", line)
    }
    return module(repository, path, given, cut)


def theirs(function: str) -> Callable[[Case], Any]:
    """What the published function pays for a case; ``RAISED`` where it raises."""
    if function in PUBLISHED:
        made = scoring(PYVISION, f"{SCORES}/{function}.py")
        numbers = scoring(PYVISION, f"{SCORES}/rule_match_verify.py").compute_score_rule_mra
        judge = {"api_key": "", "base_url": "", "model_name": ""}
    else:
        made = scoring(DEEPEYES, "verl/utils/reward_score/vl_agent.py")

    def pays(case: Case) -> Any:
        if function not in PUBLISHED:
            return float(getattr(made, function)(case.text, str(case.truth), {"question": "Q?"}))
        if case.source in NUMBERS:
            found = numbers(case.text, case.truth)
        else:
            named = (case.source,) if function == "multi_task_verifier" else ()
            found = made.compute_score(case.text, case.truth, {"question": "Q?"}, judge, *named)
        return found["score"] + (0.1 * case.calls if found["is_answer_right"] else 0.0)

    def quietly(case: Case) -> Any:
        if function in PUBLISHED and case.source == "geoguessr":
            return RAISED  # whose function its router refers to by a name that is not there
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                return pays(case)
            except Exception:
                return RAISED

    return quietly


@needs_originals
@pytest.mark.timeout(600)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_reward_is_the_published_functions(function: str) -> None:
    pays, paid = theirs(function), ours(function)
    wrong = [
        (case, pays(case), paid(case))
        for case in cases(CASES, seed=len(function))
        if not _same(pays(case), paid(case))
    ]
    assert wrong == []


def _same(first: Any, second: Any) -> bool:
    return first == second if RAISED in (first, second) else abs(first - second) < 1e-9


# Turns and results --------------------------------------------------------------------------------

TOOLS = {
    "pyvision_gym_w_image_hint": (
        "safe_persis_python_exe_tool_w_image_hint",
        "MultiModalPythonTool_w_Image_Hint",
    ),
    "pyvision_gym_wo_image_hint": (
        "safe_persis_python_exe_tool_wo_image_hint",
        "MultiModalPythonTool_wo_Image_Hint",
    ),
    "pyvision_gym_wo_video_hint": (
        "safe_persis_python_exe_tool_wo_video_hint",
        "MultiModalPythonTool_wo_Video_Hint",
    ),
}
PIECES = (
    "<code>",
    "</code>",
    "```python",
    "```python\n",
    "```",
    "```\n",
    "\n",
    " ",
    "x = 1",
    "print(2)",
    "<answer>",
    "</answer>",
    "py",
    "text",
)


class _Base:
    def __init__(self, **_: Any) -> None:
        pass


def tool(wording: str) -> Any:
    """The published environment ``wording`` without its process."""
    path, name = TOOLS[wording]
    cut = {"from verl.workers.agent.tool_envs import ToolBase": ""}
    if wording.endswith("video_hint"):
        cut["from decord import VideoReader, cpu"] = ""
    made = getattr(module(PYVISION, f"{ENVS}/{path}.py", {"ToolBase": _Base}, cut), name)()
    made.tool_using_cumulative_reward_per_turn = 0.1
    made._ensure_worker = lambda: None
    for key in dir(made):
        if key.startswith("_convert_to_messages"):
            setattr(made, key, lambda data: [])
    return made


@needs_originals
def test_code_and_answers_are_read_as_published() -> None:
    original, rng = tool("pyvision_gym_w_image_hint"), random.Random(2)
    for _ in range(20_000):
        turn = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 12)))
        assert (original.extract_code(turn) or None) == interpreter.published_code(turn), turn
        assert (original.extract_answer(turn) or None) == interpreter.published_answer(turn), turn


@needs_originals
@pytest.mark.parametrize("wording", TOOLS)
@pytest.mark.parametrize("said", ["", "42", " two\nlines \n"])
@pytest.mark.parametrize("pictures", [0, 2])
def test_a_result_is_worded_as_published(wording: Any, said: str, pictures: int) -> None:
    original = tool(wording)
    result = {"text": said.strip(), "images": ["x"] * pictures, "total_figures": 0}
    original.persistent_worker = types.SimpleNamespace(
        execute=lambda code, messages: {"status": "success", "result": result},
        terminate=lambda: None,
    )
    original._base64_to_image = lambda _: Image.new("RGB", (1, 1))
    observed = original.execute("```python\nx\n```")[0]
    before, after = interpreter.published_result(wording, said, bool(pictures))
    first = 0 if "_wo_" in wording else 1
    clues = "".join("<image>".join(interpreter.clue(first + index)) for index in range(pictures))
    if pictures:
        written = "".join(part["text"] for part in observed["chat"][0]["content"])
    else:
        written = observed.removeprefix("\n<|im_start|>user\n").removesuffix(
            "<|im_end|>\n<|im_start|>assistant\n"
        )
    assert before + clues + after == written


@needs_originals
def test_deepeyes_tools_are_the_published_ones() -> None:
    path = "verl/workers/agent/envs/mm_process_engine"
    prompt = module(DEEPEYES, f"{path}/prompt.py").PROMPT
    cut = {
        "from verl.workers.agent.tool_envs import ToolBase": "",
        "from verl.workers.agent.envs.mm_process_engine.prompt import PROMPT": "",
    }
    given = {"ToolBase": _Base, "PROMPT": prompt}
    original = module(DEEPEYES, f"{path}/visual_toolbox_v2.py", given, cut).VisualToolBoxV2(
        "", "", {}
    )
    picture, file, rng = (
        Image.radial_gradient("L").convert("RGB").resize((400, 120)),
        io.BytesIO(),
        random.Random(3),
    )
    picture.save(file, "PNG")
    toolbox = VisualToolBoxV2()
    toolbox.reset(Task("t", (Message("user", (ImageSource(data=file.getvalue()), "Q?")),)))
    original.reset("", {}, {"image": [picture]})
    numbers = [*range(-40, 460, 20), 30.5, 99.9, True, None, "5", 1e9]
    for _ in range(6_000):
        box = [rng.choice(numbers) for _ in range(rng.choice([4] * 8 + [3, 5]))]
        arguments = rng.choice(
            [
                {"bbox_2d": box, "label": "x"},
                {"bbox_2d": box},
                {"angle": rng.choice(numbers)},
                {"box": box},
                [box],
                3,
            ]
        )
        name = rng.choice(["image_zoom_in_tool", "image_rotate_tool", "crop"])
        call: Any = rng.choice(
            [{"name": name, "arguments": arguments}] * 8 + [{"name": name}, [1], "text"]
        )
        form = rng.choice(
            ["<think>t</think><tool_call>{}</tool_call>"] * 6
            + ["<tool_call>{}}}</tool_call>", "{}", "<tool_call>{}"]
        )
        turn = form.format(json.dumps(call)) + rng.choice(
            [""] * 8 + ["<answer>a</answer>", "<answer></answer>"]
        )
        with contextlib.redirect_stdout(io.StringIO()):
            observed, _, done, _ = original.execute(turn)
        step = toolbox.step(turn)
        assert step.done == done, turn
        if done:
            continue
        assert step.observation is not None
        (message,) = step.observation.messages
        said = "".join(part if isinstance(part, str) else "<image>" for part in message.parts)
        written = observed if isinstance(observed, str) else observed["prompt"]
        assert f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n" == written, turn
        if message.images:
            shown = Image.open(io.BytesIO(message.images[0].data or b""))
            assert shown.tobytes() == observed["multi_modal_data"]["image"][0].tobytes(), turn


# Prompts ------------------------------------------------------------------------------------------


def function_of(path: str, name: str, given: dict[str, Any]) -> Any:
    """One function of a file of PyVision-RL whose imports are not installed here."""
    whole = source(PYVISION, path)
    node = next(
        n for n in ast.walk(ast.parse(whole)) if isinstance(n, ast.FunctionDef) and n.name == name
    )
    node.returns = None
    for argument in node.args.args:
        argument.annotation = None
    space = {"json": json, "re": re, "tqdm": lambda rows, desc: rows, **given}
    exec(ast.unparse(node), space)
    return space[name]


@needs_originals
@pytest.mark.parametrize(
    ("file", "function", "template"),
    [
        ("rl_dataset.py", "transfer_to_rl_form_image_w_mm_hint", "vistool_with_img_info_v2"),
        (
            "rl_dataset_wo_mm_hint.py",
            "transfer_to_rl_form_image",
            "vis_tool_with_img_info_wo_init_image_v2",
        ),
        (
            "rl_dataset_wo_mm_hint.py",
            "transfer_to_rl_form_video",
            "vis_tool_with_img_info_video_v4",
        ),
    ],
)
def test_a_prompt_is_the_published_one_character_by_character(
    file: str, function: str, template: Any, tmp_path: Path
) -> None:
    Image.new("RGB", (96, 64)).save(tmp_path / "a.png")
    (tmp_path / "texts.json").write_text(
        source(PYVISION, f"{DATASET}/rl_system_prompt_template.json"), encoding="utf-8"
    )
    film = {"width": 96, "height": 64, "video_length": 3, "fps": 29.97}
    given = {
        "encode_image": lambda _: {"base64": "", "width": 96, "height": 64},
        "sample_frames_from_video": lambda _, num_frames: film,
    }
    asked = "Which {colour}?\n(A) {red}\n(B) \u201cblue\u201d"
    row = {"id": "1", "question": asked, "answer": "A", "ability": "x", "data_source": "vstar"}
    paths = {"image_path": "a.png", "video_path": "a.mp4"}
    (made,) = function_of(f"{DATASET}/{file}", function, given)(
        [row | paths], str(tmp_path / "texts.json")
    )
    shown = {"videos": [["a.png"] * 3], "fps": 29.97} if "video" in template else {"image": "a.png"}
    reader = QuestionRows(QuestionRows.Settings(published=template))
    (message,) = reader.task(row | shown, "rows:1", tmp_path).messages
    said = "".join(part if isinstance(part, str) else "<image>" for part in message.parts)
    published = made["prompt"][0]["content"]
    assert said.removeprefix("<image>" if "wo_init" in template else "") == published
    (own,) = reader.task(row | shown | {"prompt": made["prompt"]}, "rows:1", tmp_path).messages
    assert "".join(part for part in own.parts if isinstance(part, str)) == published.replace(
        "<image>", ""
    )


@needs_originals
def test_the_shipped_texts_are_the_published_ones() -> None:
    texts = json.loads(source(PYVISION, f"{DATASET}/rl_system_prompt_template.json"))
    prompt = module(DEEPEYES, "verl/workers/agent/envs/mm_process_engine/prompt.py").PROMPT
    texts |= {"deepeyes_system": prompt.SYSTEM_PROMPT_V2, "deepeyes_user": prompt.USER_PROMPT_V2}
    files = sorted((Path(__file__).parents[2] / "recipes/pyvision/prompts").glob("*.txt"))
    assert len(files) == 5
    assert [file.name for file in files if published_text(file.stem) != texts[file.stem]] == []


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    EXPECTED.parent.mkdir(exist_ok=True)
    expected = {
        function: [theirs_of(case) for case in cases(KEPT)]
        for function in FUNCTIONS
        for theirs_of in [theirs(function)]
    }
    lines = (f"{json.dumps(name)}: {json.dumps(values)}" for name, values in expected.items())
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
