"""What a schema cannot say about the manifests: that versions, images, ports, selectors, volumes,
secrets and sizes agree.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address, ip_network
from typing import Any

import yaml
from pydantic import ValidationError
from ray._private.ray_constants import DEFAULT_OBJECT_STORE_MEMORY_PROPORTION
from ray.serve.schema import ServeDeploySchema

from rayloop.cli import parser
from rayloop.core.failures import RayloopError
from rayloop.launch.ray_variables import node_settings
from rayloop.run.config import read
from rayloop.run.demand import bundles
from rayloop.run.lifetime import PreemptionSettings
from rayloop.run.preflight import lasting
from rayloop.serve_apps.judge.app import gpus
from rayloop.serve_apps.settings import JudgeSettings
from tests.deploy.k8s.kuberay import refusals
from tests.deploy.k8s.schemas import ROOT

Document = dict[str, Any]
DRAIN = 30
"""Seconds for which Ray drains a node that has to stop."""
MARGIN = 10
"""Seconds that a pod has left when its preStop has taken all of its own."""
UNITS = {"": 1.0, "m": 1e-3, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def quantity(text: str) -> float:
    match = re.fullmatch(r"([\d.]+)(\D*)", str(text))
    assert match, f"{text!r} is no quantity"
    return float(match[1]) * UNITS[match[2]]


@cache
def pinned(package: str) -> str:
    found = re.search(
        rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found, f"constraints.txt does not pin {package}"
    return found[1]


@cache
def project_version() -> str:
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    return version


@dataclass(frozen=True)
class Pod:
    """A pod that will exist, with the labels that the operator adds to ours."""

    title: str
    labels: Mapping[str, str]
    spec: Document

    @property
    def container(self) -> Document:
        container: Document = self.spec["containers"][0]
        return container

    @property
    def ports(self) -> Mapping[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    def selected(self, selector: Document) -> bool:
        return all(
            self.labels.get(name) == value
            for name, value in selector.get("matchLabels", {}).items()
        )


@dataclass(frozen=True)
class Group:
    """A group of a cluster; the head is one too."""

    pod: Pod
    spec: Document
    head: bool

    def capacity(self) -> dict[str, float]:
        """What Ray counts on one node: the container's limits, unless the group's own fields say
        otherwise.
        """
        limits, start = self.pod.container["resources"]["limits"], self.spec["rayStartParams"]
        own = {name: quantity(amount) for name, amount in self.spec.get("resources", {}).items()}
        cpus = start.get("num-cpus", limits["cpu"])
        return {"CPU": quantity(cpus), "GPU": float(limits.get("nvidia.com/gpu", 0)), **own}


def clusters(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Title and specification of every Ray cluster."""
    for document in documents:
        spec = {
            "RayCluster": document.get("spec"),
            "RayService": document.get("spec", {}).get("rayClusterConfig"),
        }
        if document["kind"] in spec:
            yield f"{document['kind']}/{document['metadata']['name']}", spec[document["kind"]]


def groups(title: str, cluster: Document) -> Iterator[Group]:
    head = cluster["headGroupSpec"]
    for name, spec in [
        ("head", head),
        *((group["groupName"], group) for group in cluster["workerGroupSpecs"]),
    ]:
        labels = {
            "ray.io/is-ray-node": "yes",
            "ray.io/node-type": "head" if spec is head else "worker",
            "ray.io/group": "headgroup" if spec is head else name,
            "ray.io/cluster": title.partition("/")[2],
        }
        template = spec["template"]
        own = template.get("metadata", {}).get("labels", {})
        yield Group(Pod(f"{title} {name}", labels | own, template["spec"]), spec, spec is head)


def all_groups(documents: list[Document]) -> list[Group]:
    return [group for title, cluster in clusters(documents) for group in groups(title, cluster)]


def pods(documents: list[Document]) -> list[Pod]:
    submitters = [
        Pod(
            f"RayJob/{job['metadata']['name']} submitter",
            template["metadata"]["labels"],
            template["spec"],
        )
        for job in of_kind(documents, "RayJob")
        for template in [job["spec"]["submitterPodTemplate"]]
    ]
    return [group.pod for group in all_groups(documents)] + submitters


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def faults(documents: list[Document]) -> list[str]:
    """Everything that does not agree, one line per fault."""
    nodes = (
        versions,
        images,
        scaling,
        starts,
        endings,
        sizes,
        shared_memory,
        mounts,
        secrets,
        settings,
    )
    rules = (refusals, *nodes, disruptions, selectors, metadata, monitors, jobs, services)
    return [fault for rule in rules for fault in rule(documents)]


def versions(documents: list[Document]) -> Iterator[str]:
    for title, cluster in clusters(documents):
        if cluster.get("rayVersion") != pinned("ray"):
            yield (
                f"{title}: rayVersion {cluster.get('rayVersion')}, constraints.txt has"
                f" ray=={pinned('ray')}"
            )
        if cluster.get("authOptions", {}).get("mode") != "token":
            yield f"{title}: authOptions.mode is not token"


def images(documents: list[Document]) -> Iterator[str]:
    used = {pod.container["image"] for pod in pods(documents)}
    if len(used) > 1:
        yield f"different images: {', '.join(sorted(used))}"
    for image in used:
        if image.rpartition(":")[2] != project_version():
            yield f"image {image}: its tag is not this version, {project_version()}"


def scaling(documents: list[Document]) -> Iterator[str]:
    for title, cluster in clusters(documents):
        for group in cluster["workerGroupSpecs"]:
            name, low, now, high = (
                group[key] for key in ("groupName", "minReplicas", "replicas", "maxReplicas")
            )
            if not low <= now <= high:
                yield f"{title} {name}: replicas {now} is outside {low} to {high}"
            if low < high and not cluster.get("enableInTreeAutoscaling"):
                yield (
                    f"{title} {name}: {low} to {high} replicas, and nothing scales them:"
                    " enableInTreeAutoscaling"
                )
            if name == "policy" and low != high:
                yield f"{title} policy: {low} to {high} replicas, but ranks are a fixed number"


def starts(documents: list[Document]) -> Iterator[str]:
    for group in all_groups(documents):
        start, title = group.spec["rayStartParams"], group.pod.title
        if group.head and start.get("num-cpus") != "0":
            yield f"{title}: rayStartParams.num-cpus is not '0'; what runs on the head dies with it"
        if group.pod.spec.get("terminationGracePeriodSeconds", DRAIN) <= DRAIN:
            yield f"{title}: terminationGracePeriodSeconds is not above Ray's {DRAIN} s of draining"


def endings(documents: list[Document]) -> Iterator[str]:
    """A pod's end is announced to what runs in it, and it has the time that this may take."""
    for group in all_groups(documents):
        title, spec = group.pod.title, group.pod.spec
        hook = (
            group.pod.container.get("lifecycle", {})
            .get("preStop", {})
            .get("exec", {})
            .get("command", [""])[-1]
        )
        if not group.head and "ray stop" not in hook:
            yield f"{title}: no preStop that stops Ray"
        if "driver" in group.spec.get("resources", {}):
            yield from (f"{title}: preStop: {fault}" for fault in _announced(hook))
        patience = sum(
            float(seconds) for seconds in re.findall(r"--(?:within|grace-period) (\d+)", hook)
        )
        if spec.get("terminationGracePeriodSeconds", DRAIN) < patience + MARGIN:
            yield (
                f"{title}: its preStop may take {patience:g} s, terminationGracePeriodSeconds"
                f" allows less than {MARGIN} s more"
            )


def _announced(hook: str) -> Iterator[str]:
    """What is wrong with a hook that has the runs of this pod saved."""
    words = shlex.split(hook.partition(";")[0])
    if words[:4] != ["python", "-m", "rayloop", "stop"] or "--here" not in words:
        yield "the runs whose process is here are not stopped"
    elif (within := parser(words[3:]).parse_args(words[3:]).within) <= PreemptionSettings().grace:
        yield f"--within {within:g} is not above preemption.grace, {PreemptionSettings().grace:g}"


def disruptions(documents: list[Document]) -> Iterator[str]:
    """Pods without which a run ends are not evicted, and no budget is of a kind that Kubernetes
    refuses for an operator's pods.
    """
    covered = set()
    for budget in of_kind(documents, "PodDisruptionBudget"):
        title, spec = f"PodDisruptionBudget/{budget['metadata']['name']}", budget["spec"]
        chosen = [group for group in all_groups(documents) if group.pod.selected(spec["selector"])]
        covered |= {group.pod.title for group in chosen}
        if not chosen:
            yield f"{title}: selects nothing"
        elif spec.get("minAvailable") != (
            pods := sum(group.spec.get("replicas", 1) for group in chosen)
        ):
            yield (
                f"{title}: minAvailable is {spec.get('minAvailable')} for {pods} pods; nothing else"
                " protects pods of an operator"
            )
    for title, cluster in clusters([d for d in documents if d["kind"] == "RayCluster"]):
        for group in groups(title, cluster):
            alone = group.head or group.spec["groupName"] in ("policy", "driver")
            if alone and group.pod.title not in covered:
                yield (
                    f"{group.pod.title}: no PodDisruptionBudget, and the run cannot go on"
                    " without it"
                )


def sizes(documents: list[Document]) -> Iterator[str]:
    gpu = "nvidia.com/gpu"
    for group in all_groups(documents):
        amounts, slots = group.pod.container["resources"], group.spec.get("resources", {})
        wanted, limit = amounts["requests"].get(gpu), amounts["limits"].get(gpu)
        if wanted != limit:
            yield f"{group.pod.title}: {gpu} is requested {wanted}, limited {limit}"
        for slot in slots.keys() & {"policy", "rollout"}:
            if slots[slot] != limit:
                yield f"{group.pod.title}: {slots[slot]} slots {slot} for {limit} GPUs"


def shared_memory(documents: list[Document]) -> Iterator[str]:
    """Ray puts its object store on disk when /dev/shm is smaller than the store's share of the
    memory.
    """
    for group in all_groups(documents):
        title, memory = (
            group.pod.title,
            quantity(group.pod.container["resources"]["limits"]["memory"]),
        )
        store = DEFAULT_OBJECT_STORE_MEMORY_PROPORTION * memory
        volumes = {volume["name"]: volume for volume in group.pod.spec["volumes"]}
        names = [
            mount["name"]
            for mount in group.pod.container["volumeMounts"]
            if mount["mountPath"] == "/dev/shm"
        ]
        shared = volumes.get(names[0], {}).get("emptyDir", {}) if names else {}
        if shared.get("medium") != "Memory":
            yield f"{title}: /dev/shm is not in memory"
        elif not store <= quantity(shared["sizeLimit"]) < memory:
            yield (
                f"{title}: /dev/shm has {shared['sizeLimit']}, the object store"
                f" {store / 2**30:.1f}Gi"
            )


def mounts(documents: list[Document]) -> Iterator[str]:
    claims = {claim["metadata"]["name"] for claim in of_kind(documents, "PersistentVolumeClaim")}
    for pod in pods(documents):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        for mount in pod.container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{pod.title}: mounts {mount['name']}, which is no volume"
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in claims:
                yield f"{pod.title}: volume {volume['name']} claims {claim}, which does not exist"


def secrets(documents: list[Document]) -> Iterator[str]:
    present = {secret["metadata"]["name"] for secret in of_kind(documents, "Secret")}
    for pod in pods(documents):
        for variable in pod.container.get("env", []):
            secret = variable.get("valueFrom", {}).get("secretKeyRef", {})
            if secret and not secret.get("optional") and secret["name"] not in present:
                yield (
                    f"{pod.title}: {variable['name']} needs the secret {secret['name']}, which does"
                    " not exist"
                )
    for title, cluster in clusters(documents):
        name = cluster.get("authOptions", {}).get("secretName")
        if name and name not in present:
            yield f"{title}: authOptions needs the secret {name}, which does not exist"


def settings(documents: list[Document]) -> Iterator[str]:
    """Every Ray process gets what rayloop/launch/ray_variables.py gives those that we start; the
    operator sets the token.
    """
    for group in all_groups(documents):
        every = node_settings(
            None, runs_jobs=group.head or "driver" in group.spec.get("resources", {})
        )
        wanted = {name: value for name, value in every.items() if not name.startswith("RAY_AUTH")}
        given = {
            variable["name"]: variable.get("value")
            for variable in group.pod.container.get("env", [])
        }
        for name, value in wanted.items():
            if given.get(name) != value:
                yield (
                    f"{group.pod.title}: {name} is {given.get(name)},"
                    f" rayloop/launch/ray_variables.py says {value}"
                )


JOBS = 8265
"""The head's port for jobs, which are code."""


def selectors(documents: list[Document]) -> Iterator[str]:
    known = pods(documents)
    for policy in of_kind(documents, "NetworkPolicy"):
        title, spec = f"NetworkPolicy/{policy['metadata']['name']}", policy["spec"]
        chosen = [pod for pod in known if pod.selected(spec["podSelector"])]
        if not chosen:
            yield f"{title}: podSelector selects nothing"
        open_ports = {port for pod in chosen for port in pod.ports.values()}
        for rule in spec.get("ingress", []):
            for port in rule.get("ports", []):
                if chosen and port["port"] not in open_ports:
                    yield f"{title}: port {port['port']} is no port of what it selects"
            takes_jobs = JOBS in [port["port"] for port in rule.get("ports", [{"port": JOBS}])]
            for peer in rule["from"]:
                if takes_jobs and peer.get("namespaceSelector") == {}:
                    yield f"{title}: lets pods of any namespace submit jobs"
                here = "namespaceSelector" not in peer
                if here and not any(pod.selected(peer["podSelector"]) for pod in known):
                    yield f"{title}: lets in {peer['podSelector']}, which selects nothing"


METADATA = (
    "169.254.169.254",
    "169.254.169.252",
    "169.254.169.253",
    "169.254.170.2",
    "169.254.170.23",
    "168.63.129.16",
    "100.100.100.200",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd20:ce::254",
    "fe80::a9fe:a9fe",
)
"""Where clouds give a node's or a pod's keys: AWS (EC2, ECS, EKS), Google, Azure, Alibaba,
OpenStack.
"""
NEEDED = ("10.0.0.1", "169.254.20.10", "2606:4700::1111", "140.82.121.3")
"""Pods and services, the resolver's cache on a node, and the world."""


def metadata(documents: list[Document]) -> Iterator[str]:
    """No pod reaches a cloud's metadata, but for names; every pod reaches what it needs."""
    policies = [
        one for one in of_kind(documents, "NetworkPolicy") if "Egress" in one["spec"]["policyTypes"]
    ]
    for pod in pods(documents):
        rules = [
            rule
            for one in policies
            if pod.selected(one["spec"]["podSelector"])
            for rule in one["spec"].get("egress", [])
        ]
        if not rules:
            yield f"{pod.title}: no egress policy keeps it from the cloud's metadata"
            continue
        for address in METADATA:
            if _reached(rules, address) - {53}:
                yield f"{pod.title}: reaches the cloud's metadata at {address}"
        for address in NEEDED:
            if not _reached(rules, address) & {ANY, 53}:
                yield f"{pod.title}: does not reach {address}"
        if not any({"namespaceSelector": {}} in rule.get("to", []) for rule in rules):
            yield f"{pod.title}: reaches no pods, where a network does not count them as addresses"


ANY = 0
"""Stands for every port."""


def _reached(rules: list[Document], address: str) -> set[int]:
    """The ports of an address that rules open."""
    ports = set[int]()
    for rule in rules:
        blocks = (
            [peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer]
            if "to" in rule
            else [{"cidr": address}]
        )
        if any(_within(address, block) for block in blocks):
            ports |= {port["port"] for port in rule.get("ports", [{"port": ANY}])}
    return ports


def _within(address: str, block: Document) -> bool:
    wanted = ip_address(address)
    return wanted in ip_network(block["cidr"]) and not any(
        wanted in ip_network(out) for out in block.get("except", [])
    )


def monitors(documents: list[Document]) -> Iterator[str]:
    for monitor in of_kind(documents, "PodMonitor"):
        title = f"PodMonitor/{monitor['metadata']['name']}"
        chosen = [pod for pod in pods(documents) if pod.selected(monitor["spec"]["selector"])]
        if not chosen:
            yield f"{title}: selects nothing"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            without = [pod for pod in chosen if endpoint["port"] not in pod.ports]
            yield from (f"{title}: {pod.title} has no port {endpoint['port']}" for pod in without)
            if endpoint["port"] == "serve" and (
                endpoint.get("path"),
                "authorization" in endpoint,
            ) != ("/metrics", True):
                yield (
                    f"{title}: the judge's /metrics, which asks for its key, is not what port serve"
                    " is asked for"
                )
    if of_kind(documents, "PodMonitor"):
        yield from (
            f"{pod.title}: no PodMonitor asks for the judge's own metrics"
            for pod in _unwatched(documents)
        )


def _unwatched(documents: list[Document]) -> Iterator[Pod]:
    """Workers that answer for a judge and that no PodMonitor asks."""
    asking = [
        monitor["spec"]["selector"]
        for monitor in of_kind(documents, "PodMonitor")
        if any(endpoint["port"] == "serve" for endpoint in monitor["spec"]["podMetricsEndpoints"])
    ]
    for group in all_groups(documents):
        serves = not group.head and "serve" in group.pod.ports
        if serves and not any(group.pod.selected(selector) for selector in asking):
            yield group.pod


def jobs(documents: list[Document]) -> Iterator[str]:
    known = dict(clusters(documents))
    for job in of_kind(documents, "RayJob"):
        title, spec = f"RayJob/{job['metadata']['name']}", job["spec"]
        chosen = f"RayCluster/{spec.get('clusterSelector', {}).get('ray.io/cluster')}"
        if chosen not in known:
            yield f"{title}: clusterSelector names {chosen}, which does not exist"
            continue
        each = groups(chosen, known[chosen])
        nodes = [
            group.capacity() for group in each for _ in range(group.spec.get("maxReplicas", 1))
        ]
        driver = {
            "CPU": spec.get("entrypointNumCpus", 0.0),
            **json.loads(spec.get("entrypointResources", "{}")),
        }
        if not driver["CPU"]:
            yield f"{title}: the entrypoint asks for no CPU, and may run on the head"
        if "driver" not in driver:
            yield (
                f"{title}: entrypointResources names no driver; elsewhere a failed job counts as"
                " succeeded"
            )
        yield from (f"{title}: {fault}" for fault in run_faults(spec["entrypoint"], driver, nodes))


def run_faults(
    entrypoint: str, driver: dict[str, float], nodes: list[dict[str, float]]
) -> Iterator[str]:
    """Whether the command can be parsed, its configuration is valid, and its actors fit on the
    nodes (first fit).
    """
    words = shlex.split(entrypoint)
    if words[:4] != ["python", "-m", "rayloop", "train"]:
        yield f"entrypoint {entrypoint!r} is not `python -m rayloop train`"
        return
    try:
        arguments = parser(words[3:]).parse_args(words[3:])
        if not arguments.again:
            yield "entrypoint: without --again nobody starts the run again that the machines failed"
        config = read(ROOT / arguments.config, arguments.overrides)
        lasting(config.output)
    except (RayloopError, OSError) as error:
        yield f"entrypoint: {error}"
        return
    free = [dict(node) for node in nodes]
    choosy_first = sorted(
        [driver, *bundles(config)],
        key=lambda bundle: (bundle.get("GPU", 0.0), len(bundle)),
        reverse=True,
    )
    for wanted in choosy_first:
        node = next(
            (n for n in free if all(n.get(name, 0.0) >= amount for name, amount in wanted.items())),
            None,
        )
        if node is None:
            yield f"no node has room for {wanted}"
            continue
        for name, amount in wanted.items():
            node[name] -= amount


def services(documents: list[Document]) -> Iterator[str]:
    for service in of_kind(documents, "RayService"):
        title = f"RayService/{service['metadata']['name']}"
        try:
            schema = ServeDeploySchema.model_validate(
                yaml.safe_load(service["spec"]["serveConfigV2"])
            )
        except ValueError as error:
            yield f"{title}: serveConfigV2: {error}"
            continue
        served = list(groups(title, service["spec"]["rayClusterConfig"]))
        yield from (
            f"{group.pod.title}: no port named serve at {schema.http_options.port}"
            for group in served
            if group.pod.ports.get("serve") != schema.http_options.port
        )
        for application in schema.applications:
            module = application.import_path.partition(":")[0]
            file = ROOT / module.replace(".", "/")
            if not (file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()):
                yield f"{title}: {application.import_path}: there is no module {module}"
            elif application.import_path == "rayloop.serve_apps.judge.app:app":
                yield from judge(title, application.args, served)


def judge(title: str, args: Document, served: list[Group]) -> Iterator[str]:
    try:
        settings = JudgeSettings.model_validate(args)
    except ValidationError as error:
        yield f"{title}: args: {error}"
        return
    wanted = {
        "CPU": settings.replicas.cpus,
        "GPU": float(gpus(settings)),
        **settings.replicas.resources,
    }
    if not any(
        all(group.capacity().get(name, 0.0) >= amount for name, amount in wanted.items())
        for group in served
    ):
        yield f"{title}: no group has room for a replica, {wanted}"
