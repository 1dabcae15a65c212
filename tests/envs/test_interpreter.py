"""The Python interpreter as an environment: state, images, pictures, errors, and whose fault an end
is.
"""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from rayloop.core.failures import ConfigError, DataFailure, EnvironmentFailed, ToolDeadline
from rayloop.core.protocols import StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.interpreter.environment import PythonInterpreter, close_sandboxes, shared_sandbox
from rayloop.sandbox import frames
from rayloop.sandbox.levels import Reached
from rayloop.sandbox.options import Level
from tests.support.pictures import picture

pytestmark = [pytest.mark.env, pytest.mark.timeout(60)]
TASK = Task("t", (Message("user", (ImageSource(data=picture(70, 50)), "What is it?")),))

Make = Callable[..., PythonInterpreter]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PythonInterpreter] = []

    def one(task: Task = TASK, **settings: Any) -> PythonInterpreter:
        made.append(PythonInterpreter(PythonInterpreter.Settings.model_validate(settings)))
        made[-1].reset(task)
        return made[-1]

    yield one
    for environment in made:
        environment.close()


@pytest.fixture(autouse=True, scope="module")
def _no_sandbox_stays() -> Iterator[None]:
    yield
    close_sandboxes()


def run(environment: PythonInterpreter, code: str) -> StepResult:
    return environment.step(f"I look.\n<code>\n```python\n{code}\n```\n</code>")


def shown(result: StepResult) -> str:
    assert result.observation is not None
    return "".join(
        part if isinstance(part, str) else "[picture]"
        for part in result.observation.messages[0].parts
    )


def test_names_and_images_are_kept_from_turn_to_turn(make: Make) -> None:
    environment = make()
    first = run(environment, "import math\nw, h = image_clue_0.size\nprint(w, h)")
    assert (
        shown(first)
        == "<tool_response>\n<interpreter>\nText Result:\n70 50\n</interpreter>\n</tool_response>"
    )
    assert first.error is None
    assert "54" in shown(run(environment, "print(w - 16, np.linalg.svd(np.eye(2))[1].sum())"))
    assert environment.evaluate() == 2.0
    assert environment.step("<answer>\n\\boxed{a cat}\n</answer>").done


def test_code_sees_no_path_of_the_process_that_made_its_interpreter(make: Make) -> None:
    assert "[] []" in shown(run(make(), "import sys; print(sys.argv[1:], sys.orig_argv[1:])"))


def test_pictures_come_back_numbered_after_those_of_the_prompt(make: Make) -> None:
    environment = make()
    result = run(
        environment,
        "plt.imshow(image_clue_0.crop((0, 0, 40, 40)).rotate(5)); plt.show(); plt.figure();"
        " plt.plot([1, 2])",
    )
    assert (
        "<image_clue_1>[picture]</image_clue_1>\n<image_clue_2>[picture]</image_clue_2>\n"
        in shown(result)
    )
    assert result.observation is not None
    data = result.observation.messages[0].images[0].data
    assert data is not None
    assert Image.open(io.BytesIO(data)).format == "PNG"


def test_the_prompt_names_images_or_hides_them(make: Make) -> None:
    environment = PythonInterpreter(PythonInterpreter.Settings())
    message = environment.reset(TASK).messages[0]
    assert [part if isinstance(part, str) else "[picture]" for part in message.parts][:4] == [
        "<image_clue_0>",
        "[picture]",
        "</image_clue_0>",
        "What is it?",
    ]
    assert "image_clue_0: a PIL image of 70x50 pixels." in str(message.parts[-1])
    environment.close()
    hidden = make(show_images=False)
    assert "70" in shown(run(hidden, "print(image_hint_0.width)"))


def test_errors_are_fed_back_or_end_the_episode(make: Make) -> None:
    environment = make()
    result = run(environment, "x = 1\n1 / 0")
    assert not result.done
    assert "line 2, in <module>" in shown(result)
    assert "ZeroDivisionError" in (result.error or "")
    assert "neither code (a ```python block, closed by ```) nor an <answer>" in shown(
        environment.step("I wonder.")
    )
    assert "1" in shown(run(environment, "print(x)"))
    assert run(make(on_error="stop"), "1 / 0").done


@pytest.mark.parametrize(
    ("wording", "hint", "said", "pictures"),
    [
        (
            "pyvision_gym_w_image_hint",
            "image_clue_0",
            "\nText Result:\nRGB 7",
            "Text Result:\n\nImage Result:\n<image_clue_1>",
        ),
        (
            "pyvision_gym_wo_image_hint",
            "image_hint_0",
            "\nText Result:\nRGB 7",
            "\nText Result:\n\nImage Result:\n<image_clue_0>",
        ),
    ],
)
def test_a_published_model_sees_what_it_was_trained_with(
    make: Make, wording: str, hint: str, said: str, pictures: str
) -> None:
    settings = {
        "wording": wording,
        "instruct": False,
        "on_error": "stop",
        "show_images": "_w_" in wording,
        "code_timeout": 2,
    }
    environment = make(**settings)
    result = run(
        environment,
        f"print({hint}.mode, np.array([3, 4]).sum(), end='\\n\\n'); matplotlib, io, base64, Image",
    )
    assert (
        shown(result) == f"<tool_response>\n<interpreter>{said}</interpreter>\n\n</tool_response>"
    )
    drawn = shown(run(environment, f"plt.imshow({hint}); plt.show()"))
    assert drawn.startswith(f"<tool_response>\n<interpreter>{pictures}[picture]</image_clue_")
    assert drawn.endswith("></interpreter>\n\n</tool_response>")
    assert environment.step("<answer>\n</answer>").done
    for ending in ("1 / 0", "while True: pass"):
        again = make(**settings)
        result = run(again, ending)
        assert result.done, ending
        assert result.error is not None


def test_what_the_code_does_to_its_interpreter_is_the_codes_doing(make: Make) -> None:
    environment = make(code_timeout=1)
    for code in (
        "while True: pass",
        "import os; os._exit(0)",
        "import ctypes; ctypes.string_at(0)",
    ):
        result = run(environment, f"y = 5\n{code}")
        assert result.error is not None, code
        assert not result.done
        assert "a new interpreter begins" in shown(result)
        assert "70" in shown(run(environment, "print(image_clue_0.width, 'y' in dir())"))
    assert "MemoryError" in (run(environment, "b = bytearray(20 << 30)").error or "")


def test_a_policy_that_kills_all_it_can_reach_fails_alone(make: Make) -> None:
    """Refused, or the end of its own interpreter: an error either way, and nobody else notices."""
    other, environment = make(), make()
    run(other, "kept = 7")
    for code in (
        "import os; os.kill(-1, 9)",
        "import subprocess; subprocess.run(['/bin/sh', '-c', 'kill -9 -1'], check=True)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.abort()",
    ):
        result = run(environment, code)
        assert result.error is not None, code
        assert not result.done
        assert "70" in shown(run(environment, "print(image_clue_0.width)"))
    assert "7" in shown(run(other, "print(kept)"))
    assert run(make(on_error="stop"), "import os; os.kill(-1, 9)").done


def test_a_hang_ends_the_episode_where_errors_stop(make: Make) -> None:
    with pytest.raises(ToolDeadline):
        run(make(code_timeout=1, on_error="stop"), "while True: pass")


def test_a_picture_that_code_forged_is_left_out(make: Make) -> None:
    forged = (
        "import sys\nf = sys._getframe(1)\nf.f_locals['self']._figures.append(b'not a picture')"
    )
    result = run(make(), forged)
    assert "[1 pictures are not shown]" in shown(result)
    assert result.error is None


def test_a_lost_fork_server_is_the_environments_failure_and_the_next_episode_works(
    make: Make,
) -> None:
    environment = make()
    settings = PythonInterpreter.Settings()
    pid = shared_sandbox("process", settings.sandbox.options).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailed, match="sandbox failed"):
        run(environment, "import time; time.sleep(20)")
    assert "70" in shown(run(make(), "print(image_clue_0.width)"))


def test_a_machine_that_does_not_reach_the_minimum_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    less = Reached(Level.PROCESS, {Level.FILTERED: "Landlock is not in this kernel"}, ())
    monkeypatch.setattr("rayloop.sandbox.levels.reached", lambda: less)
    with pytest.raises(
        ConfigError, match=r"sandbox.minimum: filtered is not reached here.*Landlock is not"
    ):
        PythonInterpreter(PythonInterpreter.Settings())


def test_videos_are_readers_of_frames(make: Make, tmp_path: Any) -> None:
    frames = []
    for index in range(3):
        frames.append(str(tmp_path / f"{index}.png"))
        Image.new("RGB", (8, 4), (index, 0, 0)).save(frames[-1])
    task = Task("v", (Message("user", ("Which?",)),), extra={"videos": [frames]})
    code = (
        "print(len(video_clue_0), video_clue_0[2].asnumpy().shape, video_clue_0.get_batch([0,"
        " 2])[1, 0, 0, 0])"
    )
    assert "3 (4, 8, 3) 2" in shown(run(make(task), code))
    with pytest.raises(DataFailure, match=r"nowhere\.png"):
        make(Task("v", TASK.messages, extra={"videos": [["nowhere.png"]]}))


@pytest.mark.parametrize(
    ("fps", "rates"),
    [([4.0, 8.0], "4.0 8.0"), ([4.0, 0.0], "4.0 1.0"), (2, "2.0 2.0"), (None, "1.0 1.0")],
)
def test_each_video_has_its_rate(make: Make, tmp_path: Any, fps: Any, rates: str) -> None:
    Image.new("RGB", (8, 4)).save(tmp_path / "frame.png")
    videos = {"videos": [[str(tmp_path / "frame.png")]] * 2, "fps": fps}
    environment = make(Task("v", TASK.messages, extra=videos))
    assert rates in shown(
        run(environment, "print(video_clue_0.get_avg_fps(), video_clue_1.get_avg_fps())")
    )


@pytest.mark.parametrize(
    "fps", [[4.0], [4.0, 8.0, 2.0], ["fast", 1.0], "fast", -1, float("inf"), "nan"]
)
def test_a_rate_that_is_none_is_the_datas_failure(make: Make, tmp_path: Any, fps: Any) -> None:
    Image.new("RGB", (8, 4)).save(tmp_path / "frame.png")
    with pytest.raises(
        DataFailure, match=r"fps: .* expected a positive number, or one for each of 2 videos"
    ):
        make(
            Task(
                "v",
                TASK.messages,
                extra={"videos": [[str(tmp_path / "frame.png")]] * 2, "fps": fps},
            )
        )


def test_a_video_may_have_more_frames_than_an_answer_has_figures(make: Make, tmp_path: Any) -> None:
    Image.new("RGB", (8, 4)).save(tmp_path / "frame.png")
    environment = make(
        Task("v", TASK.messages, extra={"videos": [[str(tmp_path / "frame.png")] * 300]})
    )
    assert "300" in shown(run(environment, "print(len(video_clue_0))"))


def test_a_video_that_is_too_large_is_the_datas_failure(
    make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 4)).save(tmp_path / "frame.png")
    monkeypatch.setattr("rayloop.sandbox.frames.MOST_GIVEN", frames.Bounds(1 << 20, 2, 1 << 20))
    with pytest.raises(DataFailure, match=r"3 images of .* bytes, which may be 2 of"):
        make(Task("v", TASK.messages, extra={"videos": [[str(tmp_path / "frame.png")] * 3]}))


PUBLISHED: dict[str, Any] = {
    "wording": "pyvision_gym_w_image_hint",
    "instruct": False,
    "on_error": "stop",
}


@pytest.mark.parametrize("settings", [{}, PUBLISHED])
def test_an_image_that_the_interpreter_cannot_read_is_the_datas_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("rayloop.sandbox.frames.MOST_GIVEN", frames.Bounds(1 << 20, 2, 10))
    with pytest.raises(
        DataFailure, match=r"cannot read them: 1 images of .* bytes, which may be 2 of 10"
    ):
        make(**settings)


def test_a_python_without_the_published_modules_is_the_environments_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.envs.interpreter.text.PRELUDE", "import no_such_module\n")
    with pytest.raises(
        EnvironmentFailed, match=r"lacks what the published prelude imports(.|\n)*no_such_module"
    ):
        make(**PUBLISHED)


@pytest.mark.parametrize("settings", [{}, {"instruct": False}, {"on_error": "stop"}])
def test_a_published_wording_stands_with_what_the_models_were_trained_with(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(
        ValidationError,
        match="wording pyvision_gym_w_image_hint needs instruct: false and on_error: stop",
    ):
        PythonInterpreter.Settings.model_validate(
            {"wording": "pyvision_gym_w_image_hint", **settings}
        )


FORGED = """
import json, os, struct
def forged(blobs=(), **parts):
    h = {{'call': 2, 'text': '', 'error': None, 'seconds': 0.0, 'dropped': 0, **parts, 'blobs': [len(b) for b in blobs]}}
    t = json.dumps(h).encode(); os.write(3, struct.pack('>I', len(t)) + t + b''.join(blobs))
forged({arguments})
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "[b'no'], dropped=10 ** 4300 - 1",
        "dropped=-7",
        "dropped=True",
        "seconds=float('nan')",
        "seconds=1e308",
        "seconds=-1.0",
        "seconds=2",
        "text='x' * 30000",
        "text=None",
        "error='x' * 5000",
        "error=7",
        "[b'x'] * 33",
        "call=10 ** 4000",
    ],
)
def test_a_forged_answer_ends_its_interpreter_and_the_episode_goes_on(
    make: Make, arguments: str
) -> None:
    environment = make(TASK)
    run(environment, "x = 1")
    said = shown(run(environment, FORGED.format(arguments=arguments)))
    assert "a new interpreter begins" in said
    assert len(said) < 500
    assert "42" in shown(run(environment, "print(6 * 7)"))


def test_pictures_are_decoded_within_the_calls_time_only(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = make(Task("t", (Message("user", ("How many?",)),)), code_timeout=1.0)
    monkeypatch.setattr("rayloop.data.images.probe", lambda *_: time.sleep(0.4) or (b"x", 1, 1))
    began = time.monotonic()
    said = shown(run(environment, "for k in range(32): plt.figure(figsize=(1, 1))\nplt.show()"))
    assert time.monotonic() - began < 3
    assert "pictures are not shown" in said


def test_a_forged_picture_is_not_decoded_for_longer_than_its_pixels_take(make: Make) -> None:
    """Its profiles unpack to three gigabytes, before the decoder comes to the first of 64 pixels."""
    build = """
import zlib
b = io.BytesIO(); Image.new('L', (8, 8)).save(b, 'PNG'); p = b.getvalue()
d = b'iCCPx\\0\\0' + zlib.compress(bytes(1 << 20), 9)
bomb = p[:33] + (struct.pack('>I', len(d) - 4) + d + struct.pack('>I', zlib.crc32(d))) * 3000 + p[33:]
"""
    environment = make(Task("t", (Message("user", ("How many?",)),)))
    began = time.monotonic()
    said = shown(
        run(
            environment,
            FORGED.replace("forged({arguments})", build).format() + "forged([bomb], call=1)",
        )
    )
    assert "[picture]" in said
    assert time.monotonic() - began < 10
