"""Reads and writes calls: JSON objects, Qwen's marks, Python's calls and lines with brackets.

Nothing of a policy's text is run. Every reader takes time in proportion to its text.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

MAX_CODE_CHARACTERS = 20_000
"""Characters of code, or of a dictionary in Python's syntax."""
QUOTED_CHARACTERS = 24
"""Characters of a text that a message quotes."""
_FUNCTION = re.compile(r"\s*<(?:function|parameter)=([\w.]{1,60})>\s*")
_PARAMETER = re.compile(r"\s*<parameter=(\w{1,60})>\n?")
_FUNCTION_END = re.compile(r"\s*(?:</function>\s*)?")
_PYTHON = re.compile(r"\s*[A-Za-z_][\w.]{0,60}\(")
_LINE_END = re.compile("\n")
_IMPORT = re.compile(r"\s*import\s")
_LINE = re.compile(r"\s*+(\w{1,40})\s*+;?\s*+")
_PADDED_BOX = re.compile(r"\[\[[\d, ]{1,60}\]\]")
_PADDING = re.compile(r"\b0+(?=\d)")


class Stop(Exception):
    """Why and where a text is not a turn; ``position`` counts characters of the text."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


@dataclass(frozen=True)
class WrittenCall:
    """A call as a model writes it.

    ``arguments`` are values of JSON by name; an argument without a name has its number, as ``0``.
    ``position`` counts the characters of the text before the call.
    """

    name: str
    arguments: Mapping[str, Any]
    position: int = 0
    form: Literal["object", "marks", "python", "line"] = "object"
    """How it is written; between marks and in a line each value is a text."""


def calls(text: str, start: int, end: int) -> list[WrittenCall]:
    """Return the calls between two positions of a text, whichever way they are written.

    The name of a JSON object is empty: its keys say what it is. Raises Stop.
    """
    body = text[start:end]
    start += len(body) - len(body.lstrip())
    body = body.strip()
    if body.startswith("{"):
        return _objects(body, start)
    if body.startswith("<"):
        return [_marked(body, start)]
    if _PYTHON.match(body) or _IMPORT.match(body):
        return _python(body, start)
    return [_line(body, start)]


def _reject(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


JSON = json.JSONDecoder(parse_constant=_reject)
"""Reads JSON without NaN and infinite numbers."""


def _objects(body: str, start: int) -> list[WrittenCall]:
    """Read JSON objects one behind the other, or one dictionary in Python's syntax."""
    results: list[WrittenCall] = []
    at = 0
    while at < len(body):
        try:
            value, end = JSON.raw_decode(body, at)
        except json.JSONDecodeError as error:
            if not results:
                return [_dictionary(body, start, error)]
            raise Stop(f"this is not JSON: {error.msg}", start + error.pos) from error
        except (ValueError, RecursionError) as error:
            raise Stop(f"this cannot be read as JSON: {_short(error)}", start + at) from error
        if not isinstance(value, dict):
            raise Stop("a JSON object was expected", start + at)
        results.append(WrittenCall("", value, start + at))
        at = end
        while at < len(body) and body[at].isspace():
            at += 1
    return results


def _dictionary(body: str, start: int, wrong: json.JSONDecodeError) -> WrittenCall:
    """Read a dictionary as Python writes it, with single quotes, True and None."""
    if "'" in body and len(body) <= MAX_CODE_CHARACTERS:
        try:
            value = ast.literal_eval(body)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            value = None
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return WrittenCall("", value, start)
    raise Stop(f"this is not JSON: {wrong.msg}", start + wrong.pos)


def _marked(body: str, start: int) -> WrittenCall:
    """Read ``<function=name>`` with a ``<parameter=name>`` for each argument; values are texts."""
    opening = _FUNCTION.match(body)
    if opening is None:
        raise Stop("a JSON object or <function=...> was expected", start)
    arguments: dict[str, Any] = {}
    at = opening.end()
    while True:
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            break
        end = body.find("</parameter>", parameter.end())
        if end < 0:
            raise Stop(f"<parameter={parameter[1]}> is never closed", start + len(body))
        if parameter[1] in arguments:
            raise Stop(f"{parameter[1]} is given twice", start + at)
        arguments[parameter[1]] = body[parameter.end() : end].removesuffix("\n")
        at = end + len("</parameter>")
    closing = _FUNCTION_END.match(body, at)
    if closing is None or closing.end() < len(body):
        raise Stop("<parameter=...> or </function> was expected", start + at)
    return WrittenCall(opening[1], arguments, start, "marks")


def _python(code: str, start: int) -> list[WrittenCall]:
    """Read lines that each are one call with constants; imports mean nothing."""
    if len(code) > MAX_CODE_CHARACTERS:
        raise Stop(f"the code has more than {MAX_CODE_CHARACTERS} characters", start)
    code = _PADDED_BOX.sub(lambda box: _PADDING.sub("", box[0]), code)
    line_starts = [0, *(line_end.end() for line_end in _LINE_END.finditer(code))]
    try:
        body = ast.parse(code).body
    except SyntaxError as error:
        line = min(error.lineno or 1, len(line_starts)) - 1
        position = min(start + line_starts[line] + (error.offset or 1) - 1, start + len(code))
        raise Stop(f"this is not a call: {error.msg}", position) from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise Stop(f"this cannot be read as calls: {_short(error)}", start) from error
    results: list[WrittenCall] = []
    for statement in body:
        if isinstance(statement, ast.Import):
            continue
        position = start + line_starts[statement.lineno - 1]
        value = statement.value if isinstance(statement, ast.Expr) else None
        results += _python_call(value, position)
    if not results:
        raise Stop("a call was expected", start + len(code))
    return results


def _python_call(node: ast.expr | None, position: int) -> Iterator[WrittenCall]:
    """Yield a call, or the calls of the list that is its only argument (``GESTURE``)."""
    name = _dotted(node.func) if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or name is None:
        raise Stop("a call such as name(argument=value) was expected", position)
    values = {str(number): argument for number, argument in enumerate(node.args)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Stop("an argument needs a name", position)
        values[keyword.arg] = keyword.value
    [only] = values.values() if len(values) == 1 else [None]
    if isinstance(only, ast.List) and any(isinstance(item, ast.Call) for item in only.elts):
        for item in only.elts:
            name = _dotted(item.func) if isinstance(item, ast.Call) else None
            if name is None or not isinstance(item, ast.Call):
                raise Stop("a call was expected in the list", position)
            yield WrittenCall(name, _constants(_named(item), position), position, "python")
        return
    yield WrittenCall(name, _constants(values, position), position, "python")


def _named(call: ast.Call) -> dict[str, ast.expr]:
    return {str(keyword.arg): keyword.value for keyword in call.keywords}


def _constants(values: Mapping[str, ast.expr], position: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, value in values.items():
        try:
            results[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise Stop(f"the argument {name} must be a constant", position) from error
    return results


def _dotted(function: ast.expr) -> str | None:
    """Return a name, or two names with a dot between; None for anything else."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return None


def _line(body: str, start: int) -> WrittenCall:
    """Read ``Name``, ``Name [a]``, ``Name [a] [b]``, or ``Name; <content>a</content>``."""
    name = _LINE.match(body)
    if name is None:
        raise Stop("an action was expected", start)
    rest = body[name.end() :]
    if not rest:
        return WrittenCall(name[1], {}, start, "line")
    if rest.startswith("<content>") and rest.endswith("</content>"):
        content = rest.removeprefix("<content>").removesuffix("</content>")
        return WrittenCall(name[1], {"0": content}, start, "line")
    if not rest.startswith("[") or not rest.endswith("]"):
        raise Stop("an argument in brackets was expected", start + name.end())
    first, _, second = rest[1:-1].partition("]")
    if not second:
        return WrittenCall(name[1], {"0": first}, start, "line")
    second = second.lstrip().removeprefix(";").lstrip()
    if not second.startswith("["):
        raise Stop("a second argument in brackets was expected", start + name.end())
    return WrittenCall(name[1], {"0": first, "1": second[1:]}, start, "line")


def _short(error: BaseException) -> str:
    return str(error)[: 2 * QUOTED_CHARACTERS] or type(error).__name__


def as_json(value: Any) -> str:
    """Return JSON as models write it, on one line and with letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def as_marks(name: str, arguments: Mapping[str, Any]) -> str:
    """Return ``<function=name>`` with the arguments in their marks."""
    parts = [f"<function={name}>"]
    for argument, value in arguments.items():
        text = value if isinstance(value, str) else as_json(value)
        parts.append(f"<parameter={argument}>\n{text}\n</parameter>")
    return "\n".join([*parts, "</function>"])


def as_python(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call in Python's syntax; arguments whose names are numbers have none."""
    parts = []
    for argument, value in arguments.items():
        parts.append(repr(value) if argument.isdigit() else f"{argument}={value!r}")
    return f"{name}({', '.join(parts)})"


def as_line(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a name with its arguments in brackets."""
    return " ".join([name, *(f"[{value}]" for value in arguments.values())])
