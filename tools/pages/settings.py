"""The texts below the fields of a settings class."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise

from pydantic import BaseModel


@functools.cache
def field_texts(model: type[BaseModel]) -> Mapping[str, str]:
    """Field -> the text below it, "" without one. An inherited field has the text of its class."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            texts |= _texts_below(cls)
    return {name: texts.get(name, "") for name in model.model_fields}


def _texts_below(cls: type) -> dict[str, str]:
    """Name of each annotated attribute of the class body -> the text below it."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for node, following in pairwise([*definition.body, ast.Pass()]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = inspect.cleandoc(str(following.value.value))
        texts[node.target.id] = text
    return texts
