"""Which part of a turn is code, and which an answer."""

import pytest

from rayloop.envs.catalog import dots, interpreter_turn
from rayloop.envs.interpreter import text
from rayloop.recipes.pyvision.original import FORBIDDEN


def test_the_last_code_block_is_run_and_a_plain_fence_only_without_one() -> None:
    block = "<code>\n```python\n{}\n```\n</code>"
    assert text.code("a " + block.format("x = 1") + " b " + block.format("x = 2")) == "x = 2\n"
    assert (
        text.code("<code>\n```python\nx = 3\n```") == "x = 3\n"
    )  # the stop string was not sampled
    assert text.code("```python\nx = 4\n```\nand\n```python\nx = 5\n```") == "x = 5\n"
    assert text.code(block.format("x = 6") + "\n```python\nx = 7\n```") == "x = 6\n"
    assert text.code("```\nx = 8\n```") is None
    assert text.code("x = 9") is None


def test_an_answer_is_the_last_one_and_not_empty() -> None:
    assert (
        text.answer("<answer>\n\\boxed{A}\n</answer> no: <answer>\n\\boxed{B}\n</answer>")
        == "\n\\boxed{B}\n"
    )
    assert text.answer("<answer> \n</answer>") is None
    assert text.answer("\\boxed{A}") is None


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("input('x')", True),
        ("my_input(1)", True),
        ("os.system('ls')", True),
        ("subprocess.run(['ls'])", False),
        ("x = 1", False),
    ],
)
def test_code_with_a_forbidden_call_is_found(code: str, refused: bool) -> None:
    assert text.forbidden(code, FORBIDDEN) is refused
    assert not text.forbidden(code, ())


def test_a_typed_line_is_code_or_an_answer() -> None:
    assert text.code(interpreter_turn("print(1)")) == "print(1)\n"
    assert text.answer(interpreter_turn("answer 7")) == "\n\\boxed{7}\n"
    written = "<code>\n```python\n1\n```\n</code>"
    assert interpreter_turn(written) == written
    assert dots(3) == dots(3) != dots(4)
