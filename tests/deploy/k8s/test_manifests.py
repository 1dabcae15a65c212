"""The Kubernetes manifests, as written and as rendered: schemas, and what must agree between them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.k8s.kuberay import refusals
from tests.deploy.k8s.rules import (
    all_groups,
    clusters,
    faults,
    groups,
    of_kind,
    pods,
    project_version,
)
from tests.deploy.k8s.schemas import RAY_KINDS, ROOT, crd_folder, schema_faults

pytestmark = pytest.mark.k8s
FOLDER = ROOT / "deploy" / "k8s"
WRITTEN = ("base", "monitoring", "judge")
RENDERED = {"cpu": ("overlays/cpu",), "gpu": ("overlays/gpu", "judge")}
"""What is installed together."""
NO_CRDS = (
    "no KubeRay CRDs: set RAYLOOP_CRD_DIR to a folder with rayclusters.yaml, rayjobs.yaml and"
    " rayservices.yaml"
)


def written() -> list[dict[str, Any]]:
    """The documents as they are in the repository, without kustomize: production's shape."""
    files = [
        path
        for name in WRITTEN
        for path in sorted((FOLDER / name).glob("*.yaml"))
        if path.stem != "kustomization"
    ]
    return [
        document
        for path in files
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def rendered(*names: str) -> list[dict[str, Any]]:
    """The documents that ``kubectl apply -k`` would send.

    Skips where there is neither kubectl nor kustomize.
    """
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(command[0]) is None:
        pytest.skip("neither kustomize nor kubectl is installed: overlays are not rendered")
    texts = [
        subprocess.run(
            [*command, str(FOLDER / name)], capture_output=True, text=True, check=True
        ).stdout
        for name in names
    ]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def all_documents(which: str) -> list[dict[str, Any]]:
    return written() if which == "written" else rendered(*RENDERED[which])


@pytest.mark.parametrize("which", ["written", *RENDERED])
def test_kubernetes_kinds_fit_their_schemas(which: str) -> None:
    documents = [document for document in all_documents(which) if document["kind"] not in RAY_KINDS]
    assert {"Namespace", "PersistentVolumeClaim", "NetworkPolicy"} <= {
        document["kind"] for document in documents
    }
    assert not [fault for document in documents for fault in schema_faults(document)]


@pytest.mark.skipif(crd_folder() is None, reason=NO_CRDS)
@pytest.mark.parametrize("which", ["written", *RENDERED])
def test_ray_kinds_fit_the_crds(which: str) -> None:
    documents = [document for document in all_documents(which) if document["kind"] in RAY_KINDS]
    assert {"RayCluster", "RayJob"} <= {document["kind"] for document in documents}
    assert not [fault for document in documents for fault in schema_faults(document)]


@pytest.mark.parametrize("which", ["written", *RENDERED])
def test_everything_agrees(which: str) -> None:
    assert not faults(all_documents(which))


@pytest.mark.skipif(crd_folder() is None, reason=NO_CRDS)
def test_a_job_with_a_cluster_of_its_own_may_be_retried() -> None:
    """As README.md describes it."""
    documents = written()
    (job,), (cluster,) = of_kind(documents, "RayJob"), of_kind(documents, "RayCluster")
    del job["spec"]["clusterSelector"]
    job["spec"] |= {
        "rayClusterSpec": cluster["spec"],
        "shutdownAfterJobFinishes": True,
        "backoffLimit": 3,
    }
    assert [*refusals([job]), *schema_faults(job)] == []


def test_kustomizations_name_every_file() -> None:
    """Without kustomize too: no manifest is forgotten, none is missing."""
    for path in FOLDER.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text(encoding="utf-8"))
        patches = [patch["path"] for patch in kustomization.get("patches", []) if "path" in patch]
        named = [*kustomization["resources"], *kustomization.get("components", []), *patches]
        assert all((path.parent / name).exists() for name in named)
        files = {file.name for file in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert files == {name for name in named if name.endswith(".yaml")}


def test_the_quickstart_needs_no_gpu() -> None:
    documents = rendered(*RENDERED["cpu"])
    assert not any(group.capacity()["GPU"] for group in all_groups(documents))
    assert not of_kind(documents, "PodMonitor"), "a bare cluster does not know this kind"


@pytest.mark.parametrize(
    ("name", "file", "extras"),
    [
        ("Dockerfile.cpu", "constraints.txt", set()),
        ("Dockerfile.gpu", "constraints-gpu.txt", {"gpu"}),
    ],
)
def test_images_are_built_from_the_tested_versions(name: str, file: str, extras: set[str]) -> None:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert all(base.partition(":")[2].count(".") == 2 for base in bases), (
        "a base image without its patch version"
    )
    installs = [line for line in lines if "pip install" in line and "--no-deps" not in line]
    assert installs
    assert all(f"-c {file} " in line for line in installs)
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert all((ROOT / path).exists() for path in copied)
    assert file in copied
    linked = {path.resolve().name for path in (ROOT / "rayloop").iterdir() if path.is_symlink()}
    assert linked <= copied, "a link of rayloop/ that leads nowhere in the image"
    (installed,) = re.findall(
        r"(?<=\s)\"?\.(?:\[([\w,-]+)\])?\"?$", "\n".join(installs), re.MULTILINE
    )
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert extras <= set(filter(None, installed.split(","))) <= set(known)


def test_the_gpu_image_can_run_vllm() -> None:
    """Triton compiles with a C and a C++ compiler; FlashInfer's sampler would need CUDA's, which
    the image has not.
    """
    text = (FOLDER / "Dockerfile.gpu").read_text(encoding="utf-8")
    (packages,) = re.findall(r"apt-get install -y --no-install-recommends ([^&]+)", text)
    assert {"gcc", "g++", "libc6-dev"} <= set(packages.split())
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in text


def test_the_readme_builds_the_images_that_are_deployed() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for documents in (["overlays", "cpu"], ["overlays", "gpu"]):
        (image,) = yaml.safe_load(
            FOLDER.joinpath(*documents, "kustomization.yaml").read_text(encoding="utf-8")
        )["images"]
        assert image["newTag"] == project_version()
        assert f"-t {image['newName']}:{image['newTag']}" in readme


@pytest.mark.skipif(
    "KUBECONFIG" not in os.environ, reason="KUBECONFIG is not set: no API server is asked"
)
@pytest.mark.parametrize("which", list(RENDERED))
def test_a_server_accepts_the_manifests(which: str, tmp_path: Path) -> None:
    """Needs a cluster with KubeRay and, for gpu, the Prometheus operator; the namespace is created
    for the dry run.
    """
    documents = rendered(*RENDERED[which])
    (namespace,) = of_kind(documents, "Namespace")
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump(namespace), encoding="utf-8")
    created = subprocess.run(["kubectl", "create", "-f", str(file)], capture_output=True, text=True)
    assert created.returncode == 0 or "AlreadyExists" in created.stderr, created.stderr
    try:
        file.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
        command = [
            "kubectl",
            "apply",
            "--server-side",
            "--dry-run=server",
            "--validate=strict",
            "-f",
            str(file),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        if created.returncode == 0:
            subprocess.run(
                ["kubectl", "delete", "namespace", namespace["metadata"]["name"], "--wait=false"],
                check=True,
            )


@pytest.mark.parametrize("which", ["written", *RENDERED])
def test_no_pod_has_a_token_of_kubernetes_but_one_that_scales_its_cluster(which: str) -> None:
    documents = all_documents(which)
    scaling = {
        group.pod.title
        for title, cluster in clusters(documents)
        for group in groups(title, cluster)
        if group.head and cluster.get("enableInTreeAutoscaling")
    }
    assert {
        pod.title for pod in pods(documents) if pod.spec.get("automountServiceAccountToken", True)
    } == scaling
