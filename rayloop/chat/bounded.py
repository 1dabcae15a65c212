"""Jinja for chat templates of strangers: a rendering that takes too long, or too much memory, ends
with an error.
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

MOST = 1 << 26
"""Characters and elements that one rendering may make, those of intermediate texts and lists
counted too.
"""
LONGEST = 60.0
"""Seconds for one rendering, which takes milliseconds."""
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
_ROUND, _JOINED, _LITERAL = "(round of a loop)", "(parts of a text)", "(collection)"
"""Names of the filters with which ``_Hooks`` counts: no template can write them."""
_OTHER_FILES = (
    jinja2.nodes.Extends,
    jinja2.nodes.FromImport,
    jinja2.nodes.Import,
    jinja2.nodes.Include,
)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox without other files, in which ``bounded`` must be called before a template is
    compiled or rendered, by the same thread. What goes beyond MOST or LONGEST raises
    jinja2.TemplateError.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        self._now = threading.local()
        # It makes as much text as its argument says, and nothing here would count that.
        self.globals.pop("lipsum")
        self.filters = {
            name: self._filter(name, function)
            for name, function in (self.filters | filters).items()
        }
        # Filters are called directly, without ``call``. Jinja computes a filter of constants once,
        # when it compiles, unless the filter takes the context: these must run each time.
        self.filters[_ROUND] = jinja2.pass_context(lambda _context, _value: self.tick())
        self.filters[_JOINED] = jinja2.pass_context(
            lambda _context, parts: self._concat(map(str, parts))
        )
        self.filters[_LITERAL] = jinja2.pass_context(lambda _context, value: self._literal(value))
        self.concat = self._concat  # type: ignore[method-assign]

    def bounded(self) -> None:
        """Begin to count for the calling thread."""
        self._now.left = MOST
        self._now.deadline = time.monotonic() + LONGEST

    def tick(self, size: int = 0) -> None:
        """Count ``size`` characters or elements that are about to be made.

        Every round of a loop and every call comes here.
        """
        now = self._now
        now.left -= size
        if now.left < 0:
            raise jinja2.TemplateError(f"it makes more than {MOST} characters or elements")
        if time.monotonic() > now.deadline:
            raise jinja2.TemplateError(f"it takes more than {LONGEST:g} s")

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """The operation, counted before it is made."""
        if operator == "+":
            self.tick(_size(left) + _size(right))
        elif operator == "%":
            self.tick(_grown("%", left, (right,)) if isinstance(left, str) else 0)
        elif isinstance(left, int) and isinstance(
            right, int
        ):  # ``*`` or ``**``: the bits of the result
            bits = (
                left.bit_length() * right
                if operator == "**"
                else left.bit_length() + right.bit_length()
            )
            self.tick(max(bits, 0))
        elif operator == "*":
            self.tick(_length(left) * _length(right))
        return self.binop_table[operator](left, right)

    def call(
        __self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The call, counted before it is made where it is a method of a text that may grow."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        args = tuple(map(_counted, args))
        name = getattr(method, "__name__", "")
        grows = isinstance(text, str) and name in _GROWING
        __self.tick(_grown(name, text, (*args, *kwargs.values())) if grows else _size(text))
        return super().call(__context, __obj, *args, **kwargs)

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            special = int(hasattr(function, "jinja_pass_arg"))  # its first argument is Jinja's own
            value = _counted(args[special])
            args = (*args[:special], value, *args[special + 1 :])
            others = (*args[special + 1 :], *kwargs.values())
            self.tick(_grown(name, value, others) if name in _GROWING else _size(value))
            result = function(*args, **kwargs)
            self.tick(_size(result))
            return result

        return counted

    def _concat(self, parts: Iterable[str]) -> str:
        """The parts in one text.

        Each is made only when it is taken, so the loop ends at the first that is too much.
        """
        kept: list[str] = []
        size = 0
        for part in parts:
            kept.append(part)
            size += len(part)
            if size > self._now.left:
                break
        self.tick(size)
        return "".join(kept)

    def _literal(self, value: Any) -> Any:
        """A list, tuple or dictionary that the template writes: it may hold another one twice,
        which may hold another one twice.
        """
        self.tick(_written(value))
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
    """Lets each round of a loop, each ``~`` and each collection be counted: Jinja itself gives no
    hook for these.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(
            0, jinja2.nodes.ExprStmt(_filtered(jinja2.nodes.Const(0), _ROUND), lineno=node.lineno)
        )
        return node

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _LITERAL)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _LITERAL)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return (
            _filtered(node, _LITERAL) if node.ctx == "load" else node
        )  # else the names that a loop or set gives

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(jinja2.nodes.List(node.nodes), _JOINED)


def _filtered(value: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None)


def _counted(value: Any) -> Any:
    """The value, as a list where its length is not known."""
    return list(value) if isinstance(value, GeneratorType) else value


def _size(value: Any) -> int:
    """Characters or elements of a text or a collection; 0 for anything else."""
    return len(value) if isinstance(value, _SIZED) else 0


def _written(value: Any) -> int:
    """Characters and elements of a value and of all that it holds, counted until they are too many."""
    size = 0
    waiting = [value]
    while waiting and size <= MOST:
        value = waiting.pop()
        size += _size(value)
        if isinstance(value, list | tuple):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
    return size


def _length(value: Any) -> int:
    """``_size``, and an integer as the length that it may mean."""
    return (
        max(int(value), 0)
        if isinstance(value, int) and not isinstance(value, bool)
        else _size(value)
    )


def _grown(name: str, value: Any, arguments: Iterable[Any]) -> int:
    """The most that a growing operation on ``value`` makes: numbers in it may be the widths of a
    format.
    """
    widths = 0
    if isinstance(value, str) and ("%" in value or "{" in value):
        widths = sum(int(number[:20]) for number in re.findall(r"[0-9]+", value))
    parts: list[Any] = []
    for argument in arguments:
        parts += argument if isinstance(argument, tuple) else [argument]
    if name == "replace":  # the text that is looked for makes nothing
        parts = parts[1:]
    return max(_size(value), 1) * (1 + sum(map(_length, parts))) + widths
