"""What KubeRay's operator refuses although the CRDs take it: the rules of its 1.7 validation that
our kinds of manifest can break.

Stated from ray-operator/controllers/ray/utils/validation.go at v1.7.0, with its feature gates at
their defaults. The operator marks a refused resource as failed and does nothing for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

Document = dict[str, Any]
LONGEST = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
"""Characters of a name, so that the names made of it still fit."""
AUTOSCALER_V2 = "RAY_enable_autoscaler_v2"
GATED = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}
"""Fields behind a feature gate that is off by default."""
UPGRADES = {
    "RayCluster": ("Recreate", "None"),
    "RayService": ("NewClusterWithIncrementalUpgrade", "NewCluster", "None"),
}
DURATION = re.compile(r"(\d+(\.\d+)?(ns|us|ms|s|m|h))+|\d+")


def refusals(documents: list[Document]) -> Iterator[str]:
    """One line per rule that is broken."""
    for document in documents:
        kind = document["kind"]
        if kind not in LONGEST:
            continue
        metadata, spec = document["metadata"], document["spec"]
        rules = {"RayCluster": _ray_cluster, "RayJob": _ray_job, "RayService": _ray_service}
        for fault in (
            *_name(kind, metadata["name"]),
            *rules[kind](spec, metadata.get("annotations") or {}),
        ):
            yield f"{kind}/{metadata['name']}: the operator refuses {fault}"


def _name(kind: str, name: str) -> Iterator[str]:
    if len(name) > LONGEST[kind]:
        yield f"a name of more than {LONGEST[kind]} characters"
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        yield "a name that is no DNS label of RFC 1035"


def _upgrade(kind: str, spec: Document) -> Iterator[str]:
    chosen = spec.get("upgradeStrategy", {}).get("type")
    if chosen is not None and chosen not in UPGRADES[kind]:
        yield f"upgradeStrategy.type {chosen}"


def _ray_cluster(spec: Document, annotations: Mapping[str, str]) -> Iterator[str]:
    yield from _upgrade("RayCluster", spec)
    yield from _cluster(spec, annotations)


def _cluster(spec: Document, annotations: Mapping[str, str]) -> Iterator[str]:
    """The specification of a cluster, wherever it stands."""
    head, workers = spec["headGroupSpec"], spec.get("workerGroupSpecs", [])
    for name, group in [("head", head), *((worker["groupName"], worker) for worker in workers)]:
        yield from (f"group {name}: {fault}" for fault in _group(group))
    for worker in workers:
        yield from (f"group {worker['groupName']}: {fault}" for fault in _worker(worker, spec))
    yield from _autoscaler(spec)
    yield from _fault_tolerance(spec, annotations)
    yield from _authentication(spec)
    yield from (
        f"{field} without the feature gate {gate}" for field, gate in GATED.items() if field in spec
    )


def _group(group: Document) -> Iterator[str]:
    start = group.get("rayStartParams") or {}
    if not group["template"]["spec"].get("containers"):
        yield "no container"
    if group.get("resources") and start.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
        yield "resources both in rayStartParams and in the group's resources"
    if "labels" in start:
        yield "labels in rayStartParams"


def _worker(worker: Document, spec: Document) -> Iterator[str]:
    low, high = worker.get("minReplicas"), worker.get("maxReplicas")
    if not spec.get("enableInTreeAutoscaling") and None in (low, high):
        yield "no minReplicas or maxReplicas without autoscaling"
    if (low or 0) < 0 or (high or 0) < 0 or (None not in (low, high) and low > high):
        yield f"minReplicas {low}, maxReplicas {high}"
    if (idle := worker.get("idleTimeoutSeconds")) is not None and (
        idle < 0 or not _second_autoscaler(spec)
    ):
        yield "idleTimeoutSeconds that is negative or without autoscaler v2"
    if worker.get("priority") and (not _second_autoscaler(spec) or _ray(spec) < Version("2.56.0")):
        yield "priority without autoscaler v2 and Ray 2.56"
    if worker.get("suspend") and spec.get("enableInTreeAutoscaling"):
        yield "suspend with autoscaling"


def _autoscaler(spec: Document) -> Iterator[str]:
    options, switch = (
        spec.get("autoscalerOptions", {}),
        _environment(spec["headGroupSpec"]).get(AUTOSCALER_V2),
    )
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds below 0"
    if any(entry["name"] == "KUBERAY_GEN_AUTOSCALER_START_CMD" for entry in options.get("env", [])):
        yield "KUBERAY_GEN_AUTOSCALER_START_CMD in autoscalerOptions.env"
    if not spec.get("enableInTreeAutoscaling"):
        if switch in ("1", "true"):
            yield f"{AUTOSCALER_V2} without enableInTreeAutoscaling"
        return
    if "version" in options and switch is not None:
        yield f"autoscalerOptions.version beside {AUTOSCALER_V2}"
    groups = [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]
    if options.get("version") == "v2" and any(
        group["template"]["spec"].get("restartPolicy", "Never") != "Never" for group in groups
    ):
        yield "a restartPolicy other than Never with autoscaler v2"


def _fault_tolerance(spec: Document, annotations: Mapping[str, str]) -> Iterator[str]:
    options, environment = spec.get("gcsFaultToleranceOptions"), _environment(spec["headGroupSpec"])
    start = spec["headGroupSpec"].get("rayStartParams") or {}
    annotated = annotations.get("ray.io/ft-enabled", "")
    if annotated and options is not None:
        yield "the annotation ray.io/ft-enabled beside gcsFaultToleranceOptions"
    if options is None and annotated.lower() != "true" and "RAY_REDIS_ADDRESS" in environment:
        yield "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
    if "redis-username" in start or "REDIS_USERNAME" in environment:
        yield "a Redis user outside of gcsFaultToleranceOptions"
    if options is None:
        return
    if start.get("redis-password") or environment.keys() & {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"}:
        yield "an address or password of Redis outside of gcsFaultToleranceOptions"
    if annotations.get("ray.io/external-storage-namespace"):
        yield "the annotation ray.io/external-storage-namespace beside gcsFaultToleranceOptions"
    if options.get("backend") == "rocksdb":
        yield "backend rocksdb without the feature gate GCSFaultToleranceEmbeddedStorage"
    elif "storage" in options:
        yield "gcsFaultToleranceOptions.storage for Redis"


def _authentication(spec: Document) -> Iterator[str]:
    options = spec.get("authOptions", {})
    by_token, by_kubernetes = options.get("mode") == "token", options.get("enableK8sTokenAuth")
    if by_token and _ray(spec) < Version("2.52.0"):
        yield "authOptions.mode token without rayVersion 2.52 or later"
    if by_kubernetes and (
        not by_token or _ray(spec) < Version("2.55.0") or options.get("secretName")
    ):
        yield "enableK8sTokenAuth without mode token and rayVersion 2.55, or beside a secretName"


def _ray_job(spec: Document, annotations: Mapping[str, str]) -> Iterator[str]:
    selector, own = spec.get("clusterSelector"), spec.get("rayClusterSpec")
    mode, retries = spec.get("submissionMode", "K8sJobMode"), spec.get("backoffLimit", 0)
    if own is None and not selector:
        yield "neither rayClusterSpec nor clusterSelector"
    if selector:
        if not selector.get("ray.io/cluster"):
            yield "a clusterSelector without ray.io/cluster"
        if retries > 0:
            yield "backoffLimit with clusterSelector"
        if spec.get("suspend"):
            yield "suspend with clusterSelector"
    if retries < 0 or (retries and mode == "InteractiveMode"):
        yield f"backoffLimit {retries} in {mode}"
    if mode == "SidecarMode" and (
        selector or spec.keys() & {"submitterPodTemplate", "submitterConfig"}
    ):
        yield "SidecarMode with a clusterSelector or a submitter"
    yield from _ending(spec)
    if own is not None:
        yield from _cluster(own, annotations)
        if own.get("authOptions", {}).get("enableK8sTokenAuth"):
            yield "enableK8sTokenAuth in a RayJob"
    try:
        if not isinstance(yaml.safe_load(spec.get("runtimeEnvYAML", "")), dict | None):
            yield "a runtimeEnvYAML that is no mapping"
    except yaml.YAMLError:
        yield "a runtimeEnvYAML that is no YAML"


def _ending(spec: Document) -> Iterator[str]:
    ends, seconds, strategy = (
        spec.get(key)
        for key in ("shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "deletionStrategy")
    )
    if spec.get("suspend") and not ends:
        yield "suspend without shutdownAfterJobFinishes"
    if (seconds or 0) < 0 or (seconds and not ends):
        yield "ttlSecondsAfterFinished that is negative or without shutdownAfterJobFinishes"
    if strategy is not None and ends and "deletionRules" in strategy:
        yield "shutdownAfterJobFinishes beside deletionRules"
    if (
        strategy is not None
        and spec.get("clusterSelector")
        and re.search("DeleteCluster|DeleteWorkers", str(strategy))
    ):
        yield "a deletionStrategy that deletes a selected cluster"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key, 1) <= 0:
            yield f"{key} {spec[key]}"


def _ray_service(spec: Document, annotations: Mapping[str, str]) -> Iterator[str]:
    cluster = spec["rayClusterConfig"]
    yield from _upgrade("RayService", spec)
    yield from _cluster(cluster, annotations)
    if cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
        yield "enableK8sTokenAuth in a RayService"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "a name for the head's service"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds below 0"
    timeout = annotations.get("ray.io/initializing-timeout", "")
    if timeout and (not DURATION.fullmatch(timeout) or not re.search("[1-9]", timeout)):
        yield f"the annotation ray.io/initializing-timeout {timeout}"
    strategy = spec.get("upgradeStrategy", {})
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade" and (
        not cluster.get("enableInTreeAutoscaling") or "clusterUpgradeOptions" not in strategy
    ):
        yield "NewClusterWithIncrementalUpgrade without autoscaling and clusterUpgradeOptions"


def _environment(group: Document) -> dict[str, Any]:
    container = next(iter(group["template"]["spec"].get("containers", [])), {})
    return {entry["name"]: entry.get("value") for entry in container.get("env", [])}


def _second_autoscaler(spec: Document) -> bool:
    asked = spec.get("autoscalerOptions", {}).get("version") == "v2"
    return asked or _environment(spec["headGroupSpec"]).get(AUTOSCALER_V2) in ("1", "true")


def _ray(spec: Document) -> Version:
    """0 for none and for what is no version."""
    try:
        return Version(spec.get("rayVersion", "0"))
    except InvalidVersion:
        return Version("0")
