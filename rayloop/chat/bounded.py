"""Jinja for chat templates of unknown origin.

A rendering that takes too long, or too much memory, ends with an error.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

MAX_RENDERED_ELEMENTS = 1 << 26
"""Elements and characters that one rendering may make, intermediate texts and lists included.
"""
RENDER_TIMEOUT_S = 60.0
"""Seconds for one rendering, which normally takes milliseconds."""
_GROWING = {
    "batch",
    "center",
    "expandtabs",
    "format",
    "format_map",
    "indent",
    "join",
    "ljust",
    "replace",
    "rjust",
    "slice",
    "tojson",
    "wordwrap",
    "zfill",
}
"""Methods of texts, and filters, whose result may be as long as the product of their arguments."""
_SIZED = (str, bytes, list, tuple, dict, range)
# Names of the filters with which ``_Hooks`` counts: no template can write them.
_ROUND_FILTER = "(round of a loop)"
_CONCAT_FILTER = "(parts of a text)"
_LITERAL_FILTER = "(collection)"
_OTHER_FILES = (
    jinja2.nodes.Extends,
    jinja2.nodes.FromImport,
    jinja2.nodes.Import,
    jinja2.nodes.Include,
)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja sandbox without other files and with limits for each rendering.

    ``bounded`` must be called before a template is compiled or rendered, by the same thread. More
    than MAX_RENDERED_ELEMENTS or RENDER_TIMEOUT_S raises jinja2.TemplateError.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        self._rendering = threading.local()
        # It makes as much text as its argument says, and nothing here would count that.
        self.globals.pop("lipsum")
        self.filters = {
            name: self._count_filter(name, function)
            for name, function in (self.filters | filters).items()
        }
        # Filters are called directly, without ``call``. Jinja computes a filter of constants once,
        # when it compiles, unless the filter takes the context: these must run each time.
        self.filters[_ROUND_FILTER] = jinja2.pass_context(lambda _context, _value: self.tick())
        self.filters[_CONCAT_FILTER] = jinja2.pass_context(
            lambda _context, parts: self._concat(map(str, parts))
        )
        self.filters[_LITERAL_FILTER] = jinja2.pass_context(
            lambda _context, value: self._count_literal(value)
        )
        self.concat = self._concat  # type: ignore[method-assign]

    def bounded(self) -> None:
        """Begin to count for the calling thread."""
        self._rendering.remaining = MAX_RENDERED_ELEMENTS
        self._rendering.deadline = time.monotonic() + RENDER_TIMEOUT_S

    def tick(self, size: int = 0) -> None:
        """Count ``size`` characters or elements that are about to be made.

        Every round of a loop and every call comes here.
        """
        rendering = self._rendering
        rendering.remaining -= size
        if rendering.remaining < 0:
            raise jinja2.TemplateError(
                f"it makes more than {MAX_RENDERED_ELEMENTS} characters or elements"
            )
        if time.monotonic() > rendering.deadline:
            raise jinja2.TemplateError(f"it takes more than {RENDER_TIMEOUT_S:g} s")

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Count the result of an operation, then compute it."""
        if operator == "+":
            self.tick(_size(left) + _size(right))
        elif operator == "%":
            self.tick(_grown_size("%", left, (right,)) if isinstance(left, str) else 0)
        elif isinstance(left, int) and isinstance(right, int):
            # ``*`` or ``**``: the bits of the result.
            if operator == "**":
                bits = left.bit_length() * right
            else:
                bits = left.bit_length() + right.bit_length()
            self.tick(max(bits, 0))
        elif operator == "*":
            self.tick(_length(left) * _length(right))
        return self.binop_table[operator](left, right)

    def call(
        __self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Count the result of a call if it is a method of a text that may grow, then call it."""
        # The sandbox wraps str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        text = getattr(method, "__self__", None)
        args = tuple(map(_with_length, args))
        name = getattr(method, "__name__", "")
        if isinstance(text, str) and name in _GROWING:
            size = _grown_size(name, text, (*args, *kwargs.values()))
        else:
            size = _size(text)
        __self.tick(size)
        return super().call(__context, __obj, *args, **kwargs)

    def _count_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def count_and_call(*args: Any, **kwargs: Any) -> Any:
            # Jinja puts the context, the evaluation context or the environment before the value.
            index = int(hasattr(function, "jinja_pass_arg"))
            value = _with_length(args[index])
            arguments = args[index + 1 :]
            if name in _GROWING:
                self.tick(_grown_size(name, value, (*arguments, *kwargs.values())))
            else:
                self.tick(_size(value))
            result = function(*args[:index], value, *arguments, **kwargs)
            self.tick(_size(result))
            return result

        return count_and_call

    def _concat(self, parts: Iterable[str]) -> str:
        """The parts in one text.

        Each is made only when it is taken, so the loop ends at the first that is too much.
        """
        texts: list[str] = []
        size = 0
        for part in parts:
            texts.append(part)
            size += len(part)
            if size > self._rendering.remaining:
                break
        self.tick(size)
        return "".join(texts)

    def _count_literal(self, value: Any) -> Any:
        """Count a list, tuple or dictionary that the template writes, and return it.

        It may hold another one twice, which may hold another one twice.
        """
        self.tick(_total_size(value))
        return value

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        for node in source.find_all(jinja2.nodes.Stmt):
            if isinstance(node, _OTHER_FILES):
                name = type(node).__name__.lower()
                raise jinja2.TemplateSyntaxError(
                    f"{name}: a chat template is one file, and cannot read others", node.lineno
                )
        return super()._generate(_Hooks().visit(source), *args, **kwargs)


class _Hooks(jinja2.visitor.NodeTransformer):
    """A visitor that makes each round of a loop, each ``~`` and each collection count.

    Jinja itself has no hook for these.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        count = _apply_filter(jinja2.nodes.Const(0), _ROUND_FILTER)
        node.body.insert(0, jinja2.nodes.ExprStmt(count, lineno=node.lineno))
        return node

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _apply_filter(node, _LITERAL_FILTER)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _apply_filter(node, _LITERAL_FILTER)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if node.ctx == "load":
            return _apply_filter(node, _LITERAL_FILTER)
        # The names that a loop or a set assigns.
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _apply_filter(jinja2.nodes.List(node.nodes), _CONCAT_FILTER)


def _apply_filter(value: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None)


def _with_length(value: Any) -> Any:
    """The value, as a list where its length is not known."""
    return list(value) if isinstance(value, GeneratorType) else value


def _size(value: Any) -> int:
    """Characters or elements of a text or a collection; 0 for anything else."""
    return len(value) if isinstance(value, _SIZED) else 0


def _total_size(value: Any) -> int:
    """Characters and elements of a value and all values in it, counted until they are too many."""
    size = 0
    waiting = [value]
    while waiting and size <= MAX_RENDERED_ELEMENTS:
        value = waiting.pop()
        size += _size(value)
        if isinstance(value, list | tuple):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
    return size


def _length(value: Any) -> int:
    """``_size``, and an integer as the length that it may mean."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(int(value), 0)
    return _size(value)


def _grown_size(name: str, value: Any, arguments: Iterable[Any]) -> int:
    """An upper bound for the size of the result of a growing operation on ``value``.

    Numbers in ``value`` may be the widths of a format.
    """
    widths = 0
    if isinstance(value, str) and ("%" in value or "{" in value):
        # An int of thousands of digits would raise; twenty are too many in any case.
        widths = sum(int(number[:20]) for number in re.findall(r"[0-9]+", value))
    parts: list[Any] = []
    for argument in arguments:
        parts += argument if isinstance(argument, tuple) else [argument]
    if name == "replace":
        # The text that is replaced adds nothing.
        parts = parts[1:]
    return max(_size(value), 1) * (1 + sum(map(_length, parts))) + widths
