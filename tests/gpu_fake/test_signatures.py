"""Every call of vLLM and SGLang in the product, bound against the Python sources of their wheels:
the pinned release must take them; how the newest one does is printed (``pytest -s``). Nothing is
installed: a few files are read out of each wheel on the package index, by HTTP ranges. Signatures,
not behaviour.
"""

from __future__ import annotations

import ast
import io
import os
import re
import ssl
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.version import Version

from tests.support.runs import ROOT

pytestmark = [pytest.mark.gpu_fake, pytest.mark.timeout(300)]

SOURCES = ROOT / "rayloop/engines/generation"
CACHE = ROOT / "build" / "wheels"
"""Below the checkout, as tests see no home of a user."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def index() -> str:
    """The package index of pip on this machine."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
        check=False,
    )
    from pip._internal.models.index import PyPI

    return (os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or PyPI.simple_url).rstrip("/")


@cache
def client() -> httpx.Client:
    return httpx.Client(follow_redirects=True, timeout=60, verify=ssl.create_default_context())


@cache
def wheels(package: str) -> dict[Version, str]:
    """The address of one wheel of each release; several have the same Python files.

    Skips when the index cannot be reached.
    """
    try:
        answer = client().get(
            f"{index()}/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        answer.raise_for_status()
        files = answer.json()["files"]
    except (httpx.HTTPError, ValueError) as error:
        pytest.skip(f"the package index cannot be reached: {error!r}")
    found = {}
    for file in files:
        if re.search(r"-(py3|cp38|cp311)-.*(x86_64|any)\.whl$", file["filename"]):
            found[Version(file["filename"].split("-")[1])] = file["url"]
    return found


class Ranges(io.RawIOBase):
    """A file on a server, of which only what is read is fetched."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        self.size = int(client().head(url).raise_for_status().headers["content-length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        last = min(self.at + len(buffer), self.size) - 1
        if last < self.at:
            return 0
        got = (
            client().get(self.url, headers={"Range": f"bytes={self.at}-{last}"}).raise_for_status()
        )
        assert got.status_code == 206, "the index sends whole wheels only"
        buffer[: len(got.content)] = got.content
        self.at += len(got.content)
        return len(got.content)


@dataclass
class Wheel:
    """The Python files of one release. Files that were read once are kept in ``CACHE``."""

    package: str
    release: Version
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        url = wheels(self.package)[self.release]
        return zipfile.ZipFile(io.BufferedReader(Ranges(url), 1 << 18))

    def text(self, path: str) -> str | None:
        """The file's text; None when the wheel has no such file."""
        kept = CACHE / f"{self.package}-{self.release}" / path
        if not kept.exists():
            try:
                content = self._zip.read(path)
            except KeyError:
                return None
            kept.parent.mkdir(parents=True, exist_ok=True)
            aside = kept.with_suffix(f".{os.getpid()}")
            aside.write_bytes(content)
            aside.rename(kept)
        return kept.read_text(encoding="utf-8")

    def tree(self, module: str) -> tuple[str, ast.Module] | None:
        """The package or module and its syntax tree. None: there is no such module."""
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if path not in self._trees:
                text = self.text(path)
                self._trees[path] = None if text is None else ast.parse(text)
            if (tree := self._trees[path]) is not None:
                return path, tree
        return None

    def find(self, module: str, name: str, deep: int = 0) -> tuple[str, ast.AST] | None:
        """Where ``name`` of a module is defined, and the definition; follows imports within the
        package.
        """
        if deep > 6 or (found := self.tree(module)) is None:
            return None
        path, tree = found
        for node in ast.walk(tree):
            if isinstance(node, Definition) and node.name == name and node in _top(tree):
                return module, node
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (to := _target(node, module, path)):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.find(to, alias.name, deep + 1)
                    if alias.name == "*" and (all_of := self.find(to, name, deep + 1)):
                        return all_of
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.endswith(f":{name}")
            ):
                return self.find(
                    module + node.value.partition(":")[0], name, deep + 1
                )  # vLLM's table of lazy imports
        assigned = (n for n in _top(tree) if isinstance(n, ast.Assign | ast.AnnAssign))
        for node in assigned:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(name in (n.id for n in ast.walk(t) if isinstance(n, ast.Name)) for t in targets):
                return module, node
        return (f"{module}.{name}", tree) if self.tree(f"{module}.{name}") else None

    def lineage(self, module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class and its bases within the package, nearest first."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return
        yield found[0], found[1]
        for base in found[1].bases:
            if isinstance(
                base := base.value if isinstance(base, ast.Subscript) else base, ast.Name
            ):
                yield from self.lineage(found[0], base.id)

    def method(self, module: str, owner: str, name: str) -> Function | None:
        """A method or property of a class, or of its bases."""
        for _, node in self.lineage(module, owner):
            for item in node.body:
                if isinstance(item, Function) and item.name == name:
                    return item
        return None


def _top(tree: ast.Module) -> list[ast.AST]:
    """Statements of a module, those under a condition included."""
    found: list[ast.AST] = []
    queue: list[ast.AST] = list(tree.body)
    while queue:
        node = queue.pop()
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            queue += [
                *node.body,
                *node.orelse,
                *(n for h in getattr(node, "handlers", ()) for n in h.body),
            ]
    return found


def _target(node: ast.ImportFrom, module: str, path: str) -> str:
    """The module from which a statement in ``module`` imports; "" outside the package."""
    if not node.level:
        return (
            node.module if node.module and node.module.split(".")[0] == module.split(".")[0] else ""
        )
    parts = module.split(".") if path.endswith("__init__.py") else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Call:
    """Something that rayloop expects of a release. ``fault`` returns why it is not there, or ""."""

    what: str
    fault: Callable[[Wheel], str]


@dataclass(frozen=True)
class Given:
    """The arguments of a call: how many by position, and the names of the others."""

    positional: int = 0
    names: frozenset[str] = frozenset()
    complete: bool = True
    """Whether these are all: no ``**options`` follow."""


def bound(node: Function, given: Given, *, method: bool) -> str:
    """Why a function does not take the arguments, or ""."""
    a = node.args
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    places = [p.arg for p in (*a.posonlyargs, *a.args)][1 if method and not static else 0 :]
    if given.positional > len(places) and not a.vararg:
        return f"takes {len(places)} arguments by position, not {given.positional}"
    named = {*places[given.positional :], *(p.arg for p in a.kwonlyargs)}
    if (unknown := given.names - named) and not a.kwarg:
        return f"takes no {', '.join(sorted(unknown))}"
    required = places[: len(places) - len(a.defaults)][given.positional :]
    required += [
        p.arg for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None
    ]
    if given.complete and (missing := set(required) - given.names):
        return f"also needs {', '.join(sorted(missing))}"
    return ""


def constructed(wheel: Wheel, module: str, name: str, given: Given) -> str:
    """Why a class cannot be made so, or a function called so, or ""."""
    found = wheel.find(module, name)
    if found is None or not isinstance(found[1], Definition):
        return f"{module} has no {name}"
    if isinstance(found[1], Function):
        return bound(found[1], given, method=False)
    own = found[1]
    inits = [n for n in own.body if isinstance(n, Function) and n.name == "__init__"]
    if inits:
        return bound(inits[0], given, method=True)
    ancestors = list(wheel.lineage(module, name))
    fields_: dict[str, bool] = {}
    for _, node in reversed(ancestors):
        for item in node.body:
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and "ClassVar" not in ast.unparse(item.annotation)
            ):
                fields_[item.target.id] = item.value is None
    inherited = wheel.method(module, name, "__init__")
    if not fields_ and inherited:
        return bound(inherited, given, method=True)
    if unknown := given.names - fields_.keys():
        return f"has no {', '.join(sorted(unknown))}"
    required = [key for key, needed in fields_.items() if needed][given.positional :]
    missing = set(required) - given.names if given.complete else set()
    return f"also needs {', '.join(sorted(missing))}" if missing else ""


def called(
    wheel: Wheel, module: str, owner: str, name: str, given: Given | None, waited: bool | None
) -> str:
    """Why a method cannot be called so, or ""; ``given`` None: a property is read."""
    node = wheel.method(module, owner, name)
    if node is None:
        attributes = {
            t.attr
            for _, c in wheel.lineage(module, owner)
            for t in ast.walk(c)
            if isinstance(t, ast.Attribute)
            and isinstance(t.ctx, ast.Store)
            and ast.unparse(t.value) == "self"
        }
        known = given is None and name in attributes
        return "" if known else f"{owner} has no {name}"
    if given is None:
        return ""
    if waited is not None and isinstance(node, ast.AsyncFunctionDef) is not waited:
        return "is no coroutine" if waited else "is a coroutine"
    return bound(node, given, method=True)


def given_by(node: ast.Call) -> Given:
    names = frozenset(k.arg for k in node.keywords if k.arg)
    whole = all(k.arg for k in node.keywords) and not any(
        isinstance(a, ast.Starred) for a in node.args
    )
    return Given(sum(not isinstance(a, ast.Starred) for a in node.args), names, whole)


def modules(prefix: str) -> list[Path]:
    return sorted(p for p in SOURCES.glob("*.py") if p.name.startswith(prefix))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def keys_of(path: Path, function: str) -> frozenset[str]:
    """The texts that are keys of the dictionaries which a function makes, but for those within
    another dictionary.
    """
    [node] = [n for n in ast.walk(parsed(path)) if isinstance(n, Function) and n.name == function]
    dicts, values = [n for n in ast.walk(node) if isinstance(n, ast.Dict)], list[ast.AST]()
    named = {
        n.targets[0].id: n.value
        for n in ast.walk(node)
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    }
    for n in ast.walk(node):
        values += (
            [value for value, key in zip(n.values, n.keys, strict=True) if key]
            if isinstance(n, ast.Dict)
            else []
        )
        values += (
            [n.value]
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Subscript)
            else []
        )
    within = [part for value in values for part in ast.walk(value)]
    within += [named[part.id] for part in within if isinstance(part, ast.Name) and part.id in named]
    outermost = [d for d in dicts if not any(d is part for part in within)]
    found = {k.value for d in outermost for k in d.keys if isinstance(k, ast.Constant)}
    for n in ast.walk(node):
        if (
            isinstance(n, ast.Assign)
            and isinstance(t := n.targets[0], ast.Subscript)
            and isinstance(t.slice, ast.Constant)
        ):
            found.add(t.slice.value)
    return frozenset(str(key) for key in found)


def imports(package: str, files: list[Path]) -> Iterator[Call]:
    """Imported names exist, and those that are called take what they are given."""
    for path in files:
        tree = parsed(path)
        known: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                known |= {
                    alias.asname or alias.name: (node.module or "", alias.name)
                    for alias in node.names
                }
        for module, name in dict.fromkeys(known.values()):
            yield Call(
                f"from {module} import {name}",
                lambda w, m=module, n=name: "" if w.find(m, n) else f"{m} has no {n}",
            )
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in known
                and (node.args or node.keywords)
            ):
                module, name = known[node.func.id]
                if (given := given_by(node)).positional or given.names:
                    yield Call(
                        shown(name, given),
                        lambda w, m=module, n=name, g=given: constructed(w, m, n, g),
                    )
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in known
            ):
                module, name = known[node.value.id]
                yield Call(
                    f"{name}.{node.attr}",
                    lambda w, m=module, n=name, a=node.attr: of_class(w, m, n, a),
                )


def of_class(wheel: Wheel, module: str, owner: str, name: str) -> str:
    """Why a class has no such method or value, or ""."""
    bodies = [item for _, node in wheel.lineage(module, owner) for item in node.body]
    if not bodies and (found := wheel.find(module, owner)):
        return (
            "" if not isinstance(found[1], ast.ClassDef) else f"{owner} is empty"
        )  # an object; its class is not looked up
    names = {
        n.id
        for item in bodies
        for n in ast.walk(item)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    names |= {item.name for item in bodies if isinstance(item, Definition)}
    return "" if name in names else f"{owner} has no {name}"


def shown(name: str, given: Given) -> str:
    return f"{name}({', '.join([*(['...'] if given.positional else []), *sorted(given.names)])})"


def methods(objects: dict[str, tuple[str, str]], files: list[Path]) -> Iterator[Call]:
    """What is called on an object: ``objects`` {expression: (module, class)}."""
    for path in files:
        tree = parsed(path)
        inside = {id(a): n for n in ast.walk(tree) for a in ast.iter_child_nodes(n)}
        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.Attribute)
                or ast.unparse(node.value) not in objects
                or isinstance(node.ctx, ast.Store)
            ):
                continue
            module, owner = objects[ast.unparse(node.value)]
            call = inside.get(id(node))
            given = waited = None
            if isinstance(call, ast.Call) and call.func is node:
                outer, given = inside.get(id(call)), given_by(call)
                waits = (
                    isinstance(outer, ast.Call)
                    and ast.unparse(outer.func) == "answered"
                    and call in outer.args
                )
                iterated = isinstance(outer, ast.AsyncFor) or (
                    isinstance(outer, ast.Call) and ast.unparse(outer.func) == "anext"
                )
                waited = isinstance(outer, ast.Await) or waits or iterated
            name = f"{owner}.{node.attr}" if given is None else shown(f"{owner}.{node.attr}", given)
            mark = " awaited" if waited else ""
            yield Call(
                name + mark,
                lambda w, m=module, o=owner, a=node.attr, g=given, f=waited: called(
                    w, m, o, a, g, f
                ),
            )


def variables(prefix: str, module: str, files: list[Path]) -> Iterator[Call]:
    """Environment variables are read somewhere in ``module``."""
    names = {
        n.value
        for p in files
        for n in ast.walk(parsed(p))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    for name in sorted(n for n in names if re.fullmatch(prefix + r"_[A-Z_0-9]+", n)):

        def fault(wheel: Wheel, name: str = name) -> str:
            return "" if name in (wheel.text(module) or "") else f"{module} does not name it"

        yield Call(f"environment: {name}", fault)


LLM = ("vllm.v1.engine.async_llm", "AsyncLLM")
WORKER = ("vllm.v1.worker.gpu_worker", "Worker")
RUNNERS = {"V1": "vllm.v1.worker.gpu_model_runner", "V2": "vllm.v1.worker.gpu.model_runner"}


def vllm_calls() -> Iterator[Call]:
    files, worker = modules("vllm"), SOURCES / "vllm_worker.py"
    yield from imports("vllm", files)
    yield from methods({"self._llm": LLM, "llm": LLM}, [p for p in files if p != worker])
    yield from variables("VLLM", "vllm/envs.py", files)
    keys = keys_of(SOURCES / "vllm_process.py", "common_arguments") | keys_of(
        SOURCES / "vllm.py", "_arguments"
    )
    keys |= keys_of(SOURCES / "vllm_chat.py", "_arguments") | {
        "served_model_name",
        "return_sampling_mask",
    }
    for key in sorted(keys):
        given = Given(0, frozenset({key}), complete=False)
        yield Call(
            f"AsyncEngineArgs({key})",
            lambda w, g=given: constructed(w, "vllm.engine.arg_utils", "AsyncEngineArgs", g),
        )
    nccl = "vllm.utils.nccl"  # rayloop/transports/process_group.py
    yield Call(
        "unpinned_nccl_env",
        lambda w: "" if w.find(nccl, "unpinned_nccl_env") else f"{nccl} has no unpinned_nccl_env",
    )
    for key in ("prompt_token_ids", "multi_modal_data", "multi_modal_uuids"):
        yield Call(
            f"tokens prompt: {key}",
            lambda w, k=key: "" if k in _inputs(w) else "vllm.inputs does not name it",
        )
    calls = {
        n.func.attr: given_by(n)
        for n in ast.walk(parsed(worker))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    own = next(
        n
        for n in ast.walk(parsed(worker))
        if isinstance(n, ast.ClassDef) and n.name == "VllmWorker"
    )
    names = {n.name for n in own.body if isinstance(n, Function)}
    names |= {
        n.target.id
        for n in own.body
        if isinstance(n, ast.AnnAssign) and n.value is not None and isinstance(n.target, ast.Name)
    }
    read = {
        n.attr
        for n in ast.walk(own)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
    }
    for name in sorted(read - names - {"model_runner"}):
        yield Call(f"Worker.{name}", lambda w, n=name: called(w, *WORKER, n, calls.get(n), None))
    for name in sorted(names):
        yield Call(f"extension: {name} is free", lambda w, n=name: collision(w, n))
    for kind, module in RUNNERS.items():
        for name in ("get_model", "reload_weights"):
            given = Given(0, frozenset({"weights_iterator"} if name == "reload_weights" else ()))
            yield Call(
                f"{kind}'s GPUModelRunner.{name}",
                lambda w, m=module, n=name, g=given: called(w, m, "GPUModelRunner", n, g, False),
            )


def _inputs(wheel: Wheel) -> str:
    names = ("data", "llm", "engine", "parse", "preprocess", "__init__")
    return "".join(wheel.text(f"vllm/inputs/{name}.py") or "" for name in names)


def collision(wheel: Wheel, name: str) -> str:
    """vLLM refuses an extension that has a name of its worker."""
    own = {
        i.name for _, node in wheel.lineage(*WORKER) for i in node.body if isinstance(i, Definition)
    }
    return f"the worker has {name}, too" if name in own else ""


MANAGER = ("sglang.srt.managers.tokenizer_manager", "TokenizerManager")


def sglang_calls() -> Iterator[Call]:
    files = modules("sglang")
    yield from imports("sglang", files)
    yield from methods({"self._manager": MANAGER}, files)
    yield from variables("SGLANG", "sglang/srt/environ.py", files)
    for key in sorted(keys_of(files[0], "parameters")):
        given = Given(0, frozenset({key}), complete=False)
        yield Call(
            f"sampling: {key}",
            lambda w, g=given: constructed(
                w, "sglang.srt.sampling.sampling_params", "SamplingParams", g
            ),
        )
    for key in sorted(
        keys_of(files[0], "arguments")
        | {"tp_size", "pp_size", "nnodes", "mem_fraction_static", "context_length"}
    ):
        yield Call(
            f"Engine({key})",
            lambda w, k=key: (
                "" if k in server_fields(w) else "no argument of the server has this name"
            ),
        )
    engine = ("sglang.srt.entrypoints.engine", "Engine")
    yield Call(
        "Engine.tokenizer_manager", lambda w: called(w, *engine, "tokenizer_manager", None, None)
    )
    schedule, cache = (
        "sglang.srt.managers.mm_schedule",
        ("sglang.srt.mem_cache.multimodal_cache", "MultiModalStaticCache"),
    )
    yield Call(
        "image features",
        lambda w: (
            "" if w.find(schedule, "embedding_cache") else f"{schedule} has no embedding_cache"
        ),
    )
    yield Call(
        "image features: clear",
        lambda w: "" if w.method(*cache, "clear") else f"{cache[1]} has no clear",
    )


def server_fields(wheel: Wheel) -> set[str]:
    """Fields of ``ServerArgs``, which newer releases spread over several files."""
    files = [
        n
        for n in wheel._zip.namelist()
        if n == "sglang/srt/server_args.py" or n.startswith("sglang/srt/arg_groups/fields/")
    ]
    trees = [ast.parse(wheel.text(name) or "") for name in files if name.endswith(".py")]
    items = [
        item
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for item in node.body
    ]
    return {
        i.target.id
        for i in items
        if isinstance(i, ast.AnnAssign) and isinstance(i.target, ast.Name)
    }


def pin(package: str) -> str:
    """The release that the project's files pin."""
    if package == "vllm":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        lines = extras["gpu"]
    else:
        lines = (ROOT / "constraints-sglang.txt").read_text(encoding="utf-8").splitlines()
    [found] = [line.partition("==")[2] for line in lines if line.startswith(f"{package}==")]
    return found


@pytest.mark.parametrize(("package", "expected"), [("vllm", vllm_calls), ("sglang", sglang_calls)])
def test_every_call_binds(package: str, expected: Callable[[], Iterator[Call]]) -> None:
    pinned, newest = Version(pin(package)), max(v for v in wheels(package) if not v.is_prerelease)
    calls = {call.what: call for call in expected()}
    releases = [Wheel(package, release) for release in dict.fromkeys((pinned, newest))]
    faults = {call.what: [call.fault(wheel) for wheel in releases] for call in calls.values()}
    print(f"\n{package}: {len(faults)} expectations; pin {pinned}, newest {newest}")
    width = max(map(len, faults))
    for what, found in faults.items():
        print(f"  {what:<{width}}  " + "  ".join(fault or "bound" for fault in found))
    assert len(faults) > 25, "the calls were not found in the product"
    assert {what: found[0] for what, found in faults.items() if found[0]} == {}


class Fake(Wheel):
    """A package of one file, to see what is noticed."""

    def text(self, path: str) -> str | None:
        source = (
            "class Old:\n    def __init__(self, a, *, b=1): ...\n    async def go(self, x,"
            " mode='keep'): ...\n"
        )
        return {"pkg/__init__.py": "from .inner import Old\n", "pkg/inner.py": source}.get(path)


def test_what_does_not_bind_is_noticed() -> None:
    fake = Fake("pkg", Version("1"))
    make = lambda *names, n=0: constructed(fake, "pkg", "Old", Given(n, frozenset(names)))  # noqa: E731
    assert make("a", "b") == make(n=1) == ""
    assert make("a", "c") == "takes no c"
    assert make() == "also needs a"
    assert make(n=2) == "takes 1 arguments by position, not 2"
    assert constructed(fake, "pkg", "New", Given()) == "pkg has no New"
    go = lambda given, waited: called(fake, "pkg", "Old", "go", given, waited)  # noqa: E731
    assert go(Given(1), True) == ""
    assert go(Given(1), False) == "is a coroutine"
    assert go(Given(1, frozenset({"how"})), True) == "takes no how"
    assert called(fake, "pkg", "Old", "stop", Given(), True) == "Old has no stop"
