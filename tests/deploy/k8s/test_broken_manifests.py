"""Manifests with one fault each are refused, and the fault is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.deploy.k8s.kuberay import refusals
from tests.deploy.k8s.rules import faults, of_kind
from tests.deploy.k8s.schemas import crd_folder, schema_faults
from tests.deploy.k8s.test_manifests import NO_CRDS, written

pytestmark = pytest.mark.k8s
Documents = list[dict[str, Any]]
Breaks = Callable[[Documents], Any]


def spec(documents: Documents, kind: str = "RayCluster") -> dict[str, Any]:
    found: dict[str, Any] = of_kind(documents, kind)[0]["spec"]
    return found


def head(documents: Documents) -> dict[str, Any]:
    found: dict[str, Any] = spec(documents)["headGroupSpec"]
    return found


def worker(documents: Documents, name: str = "policy") -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = (
        group for group in spec(documents)["workerGroupSpecs"] if group["groupName"] == name
    )
    return found


def pod(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = group["template"]["spec"]
    return found


def container(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod(group)["containers"][0]
    return found


RAY_SHAPES: list[tuple[str, Breaks]] = [
    ("2.6 is not of type 'string'", lambda d: spec(d).update(rayVersion=2.6)),
    (
        "'enableInTreeAutoscalling' was unexpected",
        lambda d: spec(d).update(enableInTreeAutoscalling=True),
    ),
    ("0 is not of type 'string'", lambda d: head(d)["rayStartParams"].update({"num-cpus": 0})),
    (
        "'8265' is not of type 'integer'",
        lambda d: container(head(d))["ports"][1].update(containerPort="8265"),
    ),
    ("'tokens' is not one of", lambda d: spec(d)["authOptions"].update(mode="tokens")),
    ("'minReplica' was unexpected", lambda d: worker(d).update(minReplica=1)),
    ("'groupName' is a required property", lambda d: worker(d).pop("groupName")),
    ("'cpus' was unexpected", lambda d: container(head(d))["resources"].update(cpus="4")),
    ("'three' is not of type 'integer'", lambda d: spec(d, "RayJob").update(backoffLimit="three")),
    (
        "'command' was unexpected",
        lambda d: spec(d, "RayJob").update(command="python -m rayloop train"),
    ),
    (
        "'rayClusterConfig' is a required property",
        lambda d: spec(d, "RayService").pop("rayClusterConfig"),
    ),
    ("'serveConfig' was unexpected", lambda d: spec(d, "RayService").update(serveConfig="")),
]

KUBERNETES_SHAPES: list[tuple[str, Breaks]] = [
    (
        "'accessMode' was unexpected",
        lambda d: spec(d, "PersistentVolumeClaim").update(accessMode="ReadWriteMany"),
    ),
    (
        "is not of type 'array'",
        lambda d: spec(d, "PersistentVolumeClaim").update(accessModes="ReadWriteMany"),
    ),
    ("'podSelectors' was unexpected", lambda d: spec(d, "NetworkPolicy").update(podSelectors={})),
    ("'name' was unexpected", lambda d: of_kind(d, "Namespace")[0].update(name="rayloop")),
    (
        "'minAvailble' was unexpected",
        lambda d: spec(d, "PodDisruptionBudget").update(minAvailble=1),
    ),
    (
        "'podMetricEndpoints' was unexpected",
        lambda d: spec(d, "PodMonitor").update(podMetricEndpoints=[]),
    ),
]


def _service(documents: Documents) -> dict[str, Any]:
    found: dict[str, Any] = spec(documents, "RayService")["rayClusterConfig"]
    return found


def _named(documents: Documents, kind: str, name: str) -> None:
    of_kind(documents, kind)[0]["metadata"]["name"] = name


def _leaves(group: dict[str, Any], command: str) -> None:
    container(group)["lifecycle"]["preStop"]["exec"]["command"][-1] = command


def _egress(documents: Documents) -> dict[str, Any]:
    return next(
        one for one in of_kind(documents, "NetworkPolicy") if "Egress" in one["spec"]["policyTypes"]
    )


def _world(documents: Documents, peer: int = 1) -> dict[str, Any]:
    block: dict[str, Any] = _egress(documents)["spec"]["egress"][0]["to"][peer]["ipBlock"]
    return block


def _monitored(documents: Documents) -> dict[str, Any]:
    found: dict[str, Any] = of_kind(documents, "PodMonitor")[-1]["spec"]["podMetricsEndpoints"][0]
    return found


def replace_key(where: dict[str, Any], old: str, new: str) -> None:
    where[new] = where.pop(old)


def _environment(group: dict[str, Any], name: str, value: str) -> None:
    container(group)["env"].append({"name": name, "value": value})


REFUSED: list[tuple[str, Breaks]] = [
    ("backoffLimit with clusterSelector", lambda d: spec(d, "RayJob").update(backoffLimit=3)),
    ("backoffLimit -1", lambda d: spec(d, "RayJob").update(backoffLimit=-1)),
    (
        "backoffLimit 1 in Interactive",
        lambda d: spec(d, "RayJob").update(submissionMode="InteractiveMode", backoffLimit=1),
    ),
    (
        "neither rayClusterSpec nor clusterSelector",
        lambda d: spec(d, "RayJob").pop("clusterSelector"),
    ),
    (
        "clusterSelector without ray.io/cluster",
        lambda d: spec(d, "RayJob").update(clusterSelector={"name": "rayloop"}),
    ),
    (
        "suspend with clusterSelector",
        lambda d: spec(d, "RayJob").update(suspend=True, shutdownAfterJobFinishes=True),
    ),
    ("suspend without shutdown", lambda d: spec(d, "RayJob").update(suspend=True)),
    ("SidecarMode with", lambda d: spec(d, "RayJob").update(submissionMode="SidecarMode")),
    (
        "ttlSecondsAfterFinished that",
        lambda d: spec(d, "RayJob").update(ttlSecondsAfterFinished=60),
    ),
    ("activeDeadlineSeconds 0", lambda d: spec(d, "RayJob").update(activeDeadlineSeconds=0)),
    (
        "runtimeEnvYAML that is no YAML",
        lambda d: spec(d, "RayJob").update(runtimeEnvYAML="env_vars: ["),
    ),
    (
        "runtimeEnvYAML that is no mapping",
        lambda d: spec(d, "RayJob").update(runtimeEnvYAML="- pip"),
    ),
    (
        "deletes a selected cluster",
        lambda d: spec(d, "RayJob").update(
            deletionStrategy={"onSuccess": {"policy": "DeleteCluster"}}
        ),
    ),
    (
        "group head: no container",
        lambda d: spec(d, "RayJob").update(
            rayClusterSpec={**_service(d), "headGroupSpec": {"template": {"spec": {}}}}
        ),
    ),
    ("a name of more than 47", lambda d: _named(d, "RayJob", "t" * 48)),
    ("no DNS label", lambda d: _named(d, "RayService", "2nd-judge")),
    ("a name of more than 53", lambda d: _named(d, "RayCluster", "r" * 54)),
    (
        "group policy: resources both",
        lambda d: worker(d)["rayStartParams"].update({"num-cpus": "8"}),
    ),
    ("group policy: labels in", lambda d: worker(d)["rayStartParams"].update(labels="a=b")),
    (
        "group judge: no minReplicas",
        lambda d: _service(d)["workerGroupSpecs"][0].pop("minReplicas"),
    ),
    ("group policy: minReplicas 2, max", lambda d: worker(d).update(minReplicas=2)),
    (
        "group rollout: idleTimeoutSeconds",
        lambda d: spec(d)["autoscalerOptions"].update(version="v1"),
    ),
    (
        "group policy: priority",
        lambda d: [worker(d).update(priority=1), spec(d).update(rayVersion="2.55.0")],
    ),
    ("group policy: suspend", lambda d: worker(d).update(suspend=True)),
    (
        "beside RAY_enable_autoscaler_v2",
        lambda d: _environment(head(d), "RAY_enable_autoscaler_v2", "1"),
    ),
    (
        "without enableInTreeAutoscaling",
        lambda d: _environment(_service(d)["headGroupSpec"], "RAY_enable_autoscaler_v2", "1"),
    ),
    ("restartPolicy other than Never", lambda d: pod(worker(d)).update(restartPolicy="Always")),
    (
        "idleTimeoutSeconds below 0",
        lambda d: spec(d)["autoscalerOptions"].update(idleTimeoutSeconds=-1),
    ),
    (
        "RAY_REDIS_ADDRESS without",
        lambda d: _environment(head(d), "RAY_REDIS_ADDRESS", "redis:6379"),
    ),
    (
        "password of Redis outside",
        lambda d: [
            spec(d).update(gcsFaultToleranceOptions={}),
            _environment(head(d), "REDIS_PASSWORD", "x"),
        ],
    ),
    ("a Redis user", lambda d: _environment(head(d), "REDIS_USERNAME", "x")),
    ("backend rocksdb", lambda d: spec(d).update(gcsFaultToleranceOptions={"backend": "rocksdb"})),
    ("mode token without rayVersion", lambda d: spec(d).pop("rayVersion")),
    (
        "enableK8sTokenAuth in a RayService",
        lambda d: _service(d)["authOptions"].update(enableK8sTokenAuth=True),
    ),
    ("networkPolicy without the feature gate", lambda d: spec(d).update(networkPolicy={})),
    (
        "upgradeStrategy.type Rolling",
        lambda d: spec(d, "RayService").update(upgradeStrategy={"type": "Rolling"}),
    ),
    (
        "IncrementalUpgrade without",
        lambda d: spec(d, "RayService").update(
            upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade"}
        ),
    ),
    (
        "DeletionDelaySeconds below 0",
        lambda d: spec(d, "RayService").update(rayClusterDeletionDelaySeconds=-1),
    ),
    (
        "head's service",
        lambda d: _service(d)["headGroupSpec"].update(headService={"metadata": {"name": "judge"}}),
    ),
    (
        "initializing-timeout soon",
        lambda d: of_kind(d, "RayService")[0]["metadata"].update(
            annotations={"ray.io/initializing-timeout": "soon"}
        ),
    ),
]

DISAGREEMENTS: list[tuple[str, Breaks]] = [
    ("rayVersion 2.59.0, constraints.txt has", lambda d: spec(d).update(rayVersion="2.59.0")),
    ("authOptions.mode is not token", lambda d: spec(d)["authOptions"].update(mode="disabled")),
    ("different images", lambda d: container(worker(d)).update(image="rayloop:0.0.9")),
    (
        "its tag is not this version",
        lambda d: [container(worker(d)).update(image="rayloop:latest")],
    ),
    ("policy: replicas 3 is outside 1 to 1", lambda d: worker(d).update(replicas=3)),
    ("ranks are a fixed number", lambda d: worker(d).update(maxReplicas=2)),
    ("nothing scales them", lambda d: spec(d).update(enableInTreeAutoscaling=False)),
    ("num-cpus is not '0'", lambda d: head(d)["rayStartParams"].update({"num-cpus": "4"})),
    ("policy: no preStop", lambda d: container(worker(d)).pop("lifecycle")),
    (
        "driver: its preStop may take 190 s",
        lambda d: pod(worker(d, "driver")).update(terminationGracePeriodSeconds=190),
    ),
    (
        "runs whose process is here are not stopped",
        lambda d: _leaves(worker(d, "driver"), "ray stop"),
    ),
    (
        "--within 60 is not above preemption.grace, 120",
        lambda d: _leaves(
            worker(d, "driver"), "python -m rayloop stop /runs/* --here --within 60; ray stop"
        ),
    ),
    (
        "ray-head: minAvailable is None for 1 pods",
        lambda d: replace_key(spec(d, "PodDisruptionBudget"), "minAvailable", "maxUnavailable"),
    ),
    (
        "ray-policy: minAvailable is 1 for 2 pods",
        lambda d: worker(d).update(replicas=2, maxReplicas=2),
    ),
    (
        "ray-head: selects nothing",
        lambda d: spec(d, "PodDisruptionBudget")["selector"]["matchLabels"].update(
            {"ray.io/cluster": "other"}
        ),
    ),
    ("driver: no PodDisruptionBudget", lambda d: d.remove(of_kind(d, "PodDisruptionBudget")[2])),
    ("judge: no PodMonitor asks", lambda d: d.remove(of_kind(d, "PodMonitor")[-1])),
    ("which asks for its key", lambda d: _monitored(d).pop("authorization")),
    ("which asks for its key", lambda d: _monitored(d).update(path="/")),
    ("not above Ray's 30 s", lambda d: pod(worker(d)).update(terminationGracePeriodSeconds=30)),
    (
        "is requested 2, limited 4",
        lambda d: container(worker(d))["resources"]["requests"].update({"nvidia.com/gpu": "2"}),
    ),
    ("8 slots policy for 4 GPUs", lambda d: worker(d)["resources"].update(policy="8")),
    ("/dev/shm is not in memory", lambda d: pod(head(d))["volumes"][0]["emptyDir"].pop("medium")),
    (
        "/dev/shm has 1Gi, the object store",
        lambda d: pod(worker(d))["volumes"][0]["emptyDir"].update(sizeLimit="1Gi"),
    ),
    ("mounts runs, which is no volume", lambda d: pod(worker(d))["volumes"].pop(1)),
    (
        "claims runs, which does not exist",
        lambda d: d.remove(of_kind(d, "PersistentVolumeClaim")[0]),
    ),
    (
        "needs the secret huggingface",
        lambda d: container(head(d))["env"][-1]["valueFrom"]["secretKeyRef"].pop("optional"),
    ),
    ("needs the secret ray-token", lambda d: spec(d)["authOptions"].update(secretName="ray-token")),
    ("raylet_subreaper is None", lambda d: container(worker(d))["env"].pop(0)),
    (
        "podSelector selects nothing",
        lambda d: spec(d, "NetworkPolicy")["podSelector"]["matchLabels"].update(app="ray"),
    ),
    (
        "port 8266 is no port",
        lambda d: spec(d, "NetworkPolicy")["ingress"][1]["ports"][0].update(port=8266),
    ),
    ("lets in", lambda d: spec(d, "RayJob")["submitterPodTemplate"]["metadata"]["labels"].clear()),
    (
        "any namespace submit jobs",
        lambda d: spec(d, "NetworkPolicy")["ingress"][2]["from"][0].update(namespaceSelector={}),
    ),
    ("no egress policy keeps it", lambda d: d.remove(_egress(d))),
    (
        "no egress policy keeps it",
        lambda d: _egress(d)["spec"].update(podSelector={"matchLabels": {"app": "ray"}}),
    ),
    ("metadata at 169.254.169.254", lambda d: _egress(d)["spec"]["egress"].append({})),
    ("metadata at 169.254.169.254", lambda d: _egress(d)["spec"]["egress"][1].pop("ports")),
    (
        "metadata at 169.254.170.23",
        lambda d: _world(d)["except"].__setitem__(0, "169.254.169.254/32"),
    ),
    ("metadata at fd00:ec2::254", lambda d: _world(d, 2).pop("except")),
    ("does not reach 169.254.20.10", lambda d: _egress(d)["spec"]["egress"].pop(1)),
    ("does not reach 140.82.121.3", lambda d: _world(d).update(cidr="10.0.0.0/8")),
    ("reaches no pods", lambda d: _egress(d)["spec"]["egress"][0]["to"].pop(0)),
    (
        "ray-head: selects nothing",
        lambda d: spec(d, "PodMonitor")["selector"]["matchLabels"].update(app="ray"),
    ),
    ("head has no port as-metrics", lambda d: container(head(d))["ports"].pop(3)),
    (
        "RayCluster/other, which does not exist",
        lambda d: spec(d, "RayJob")["clusterSelector"].update({"ray.io/cluster": "other"}),
    ),
    ("may run on the head", lambda d: spec(d, "RayJob").pop("entrypointNumCpus")),
    (
        "raylet_subreaper is true",
        lambda d: container(worker(d, "driver"))["env"][0].update(value="true"),
    ),
    ("entrypointResources names no driver", lambda d: spec(d, "RayJob").pop("entrypointResources")),
    ("no node has room for", lambda d: worker(d, "rollout").update(maxReplicas=1)),
    ("no node has room for", lambda d: worker(d, "environment")["resources"].clear()),
    (
        "serveConfigV2",
        lambda d: spec(d, "RayService").update(serveConfigV2="applications: [{name: judge}]"),
    ),
    (
        "there is no module rayloop.judge_app",
        lambda d: replace(
            spec(d, "RayService"), "serveConfigV2", "rayloop.serve_apps.", "rayloop.judge_app."
        ),
    ),
    ("args: ", lambda d: replace(spec(d, "RayService"), "serveConfigV2", "gpus:", "gpu:")),
    (
        "no group has room for a replica",
        lambda d: replace(spec(d, "RayService"), "serveConfigV2", "gpus: 4", "gpus: 8"),
    ),
    (
        "no port named serve at 9000",
        lambda d: replace(spec(d, "RayService"), "serveConfigV2", "port: 8000", "port: 9000"),
    ),
    (
        "is not `python -m rayloop train`",
        lambda d: spec(d, "RayJob").update(entrypoint="python train.py"),
    ),
    ("without --again", lambda d: replace(spec(d, "RayJob"), "entrypoint", " --again=20", "")),
    (
        "rollout.actor",
        lambda d: replace(spec(d, "RayJob"), "entrypoint", "rollout.actors=2", "rollout.actor=2"),
    ),
    (
        "is relative",
        lambda d: replace(spec(d, "RayJob"), "entrypoint", "output=/runs", "output=runs"),
    ),
    ("no.yaml", lambda d: replace(spec(d, "RayJob"), "entrypoint", "arc_vision.yaml", "no.yaml")),
]


def replace(where: dict[str, Any], key: str, old: str, new: str) -> None:
    assert old in where[key]
    where[key] = where[key].replace(old, new)


# deploy/k8s/base/rayjob.yaml as it was at 5507fb5: no run ever started from it.
AS_IT_WAS = """
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: train}
spec:
  clusterSelector: {ray.io/cluster: rayloop}
  entrypoint: python -m rayloop train recipes/arc_vision/arc_vision.yaml output=/runs
  submissionMode: K8sJobMode
  backoffLimit: 3
"""


def test_the_file_of_old_is_refused_for_the_reason_that_the_operator_gave() -> None:
    """validation.go:575: `The RayJob spec is invalid: BackoffLimit is incompatible with
    ClusterSelector mode`.
    """
    job = yaml.safe_load(AS_IT_WAS)
    assert list(refusals([job])) == [
        "RayJob/train: the operator refuses backoffLimit with clusterSelector"
    ]
    assert crd_folder() is None or not list(schema_faults(job)), "the CRDs take it"


def broken(breaks: Breaks) -> Documents:
    documents: Documents = separate(written())
    breaks(documents)
    return documents


def separate(value: Any) -> Any:
    """A copy in which the places that share a YAML anchor share nothing: a fault is in one place
    only.
    """
    if isinstance(value, dict):
        return {key: separate(part) for key, part in value.items()}
    return [separate(part) for part in value] if isinstance(value, list) else value


@pytest.mark.skipif(crd_folder() is None, reason=NO_CRDS)
@pytest.mark.parametrize(("named", "breaks"), RAY_SHAPES)
def test_the_crds_refuse(named: str, breaks: Breaks) -> None:
    found = [fault for document in broken(breaks) for fault in schema_faults(document)]
    assert len(found) == 1
    assert named in found[0]


@pytest.mark.parametrize(("named", "breaks"), KUBERNETES_SHAPES)
def test_the_schemas_refuse(named: str, breaks: Breaks) -> None:
    found = [fault for document in broken(breaks) for fault in schema_faults(document)]
    assert len(found) == 1
    assert named in found[0]


@pytest.mark.parametrize(("named", "breaks"), REFUSED)
def test_the_operator_refuses(named: str, breaks: Breaks) -> None:
    found = list(refusals(broken(breaks)))
    assert any(named in fault for fault in found), found


@pytest.mark.parametrize(("named", "breaks"), DISAGREEMENTS)
def test_the_rules_refuse(named: str, breaks: Breaks) -> None:
    found = faults(broken(breaks))
    assert any(named in fault for fault in found), found
