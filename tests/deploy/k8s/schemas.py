"""The shape of a manifest: KubeRay's CRDs and Kubernetes' own schemas, as strict as the server's
field validation.

What only a server does is not covered: webhooks, admission, and the CRDs' CEL rules (they concern
fields we do not use).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="`make test-k8s` installs it"
)

ROOT = Path(__file__).parents[3]
KUBERNETES = "1.34"
"""The version of the schemas of Kubernetes' own kinds."""
RAY_KINDS = ("RayCluster", "RayJob", "RayService")


def strict_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_RELABELING = strict_object(
    sourceLabels={"type": "array", "items": {"type": "string"}}, targetLabel={"type": "string"}
)
_SECRET = strict_object(name={"type": "string"}, key={"type": "string"})
_ENDPOINT = strict_object(
    port={"type": "string"},
    path={"type": "string"},
    authorization=strict_object(type={"type": "string"}, credentials=_SECRET),
    relabelings={"type": "array", "items": _RELABELING},
)
POD_MONITOR = strict_object(
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "PodMonitor"},
    metadata=strict_object(name={"type": "string"}, namespace={"type": "string"}, labels=_LABELS),
    spec=strict_object(
        selector=strict_object(matchLabels=_LABELS),
        podMetricsEndpoints={"type": "array", "items": _ENDPOINT},
    ),
)
"""The part of the Prometheus operator's kind that we use: its CRD is not at hand."""


def crd_folder() -> Path | None:
    """KubeRay's CRDs: RAYLOOP_CRD_DIR, else ../shared/data/kuberay_crds beside the repository, else
    None.
    """
    named = os.environ.get("RAYLOOP_CRD_DIR")
    folder = Path(named) if named else ROOT.parent / "shared" / "data" / "kuberay_crds"
    if named and not folder.is_dir():
        raise FileNotFoundError(f"RAYLOOP_CRD_DIR: {folder} is no folder")
    return folder if folder.is_dir() else None


@cache
def ray_validator(kind: str, folder: Path) -> Draft202012Validator:
    """The schema of ``kind`` in API ray.io/v1."""
    crd = yaml.load(
        (folder / f"{kind.lower()}s.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
    )
    (schema,) = (
        v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == "v1"
    )
    _make_strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(schema)


def _make_strict(schema: Any) -> None:
    """Translate structural OpenAPI in place into JSON schema that refuses unknown fields."""
    for part in (
        schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    ):
        _make_strict(part)
    if not isinstance(schema, dict):
        return
    properties = schema.get("properties")
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]
    if schema.get("nullable") is True and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(properties, dict) and schema.get("type") == "object":
        if isinstance(schema.get("required"), list):  # a server fills in defaults first
            schema["required"] = [
                name for name in schema["required"] if "default" not in properties.get(name, {})
            ]
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)


def schema_faults(document: dict[str, Any]) -> Iterator[str]:
    """What a server would refuse, one line per fault with its place.

    Without CRDs nothing is said about Ray's kinds.
    """
    kind = document.get("kind", "no kind")
    title = f"{kind}/{document.get('metadata', {}).get('name')}"
    if kind in RAY_KINDS:
        folder = crd_folder()
        errors = ray_validator(kind, folder).iter_errors(document) if folder else ()
        yield from (f"{title}: {error.json_path}: {error.message[:200]}" for error in errors)
    elif kind == "PodMonitor":
        errors = Draft202012Validator(POD_MONITOR).iter_errors(document)
        yield from (f"{title}: {error.json_path}: {error.message[:200]}" for error in errors)
    else:
        try:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{title}: {'.'.join(map(str, error.path))}: {error.message[:200]}"
