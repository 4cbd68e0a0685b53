"""The manifests as kubectl renders them, and lookups in them."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from dockerfile import ROOT
from programs import parsed

K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ["cpu-demo", "single-gpu-node", "production"]

Manifest = dict[str, Any]

kustomize = shutil.which("kubectl") or shutil.which("kustomize")


@cache
def rendered(folder: Path) -> list[Manifest]:
    assert kustomize is not None
    command = [kustomize, "kustomize" if kustomize.endswith("kubectl") else "build", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


# -- looking things up -------------------------------------------------------------------------------------------------


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name]
    return found


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet", "Job")


def pod_of(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def labels_of(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def containers_of(workload: Manifest) -> list[Manifest]:
    pod = pod_of(workload)
    return [*pod.get("initContainers", []), *pod["containers"]]


def component_of(workload: Manifest) -> str:
    return labels_of(workload)["app.kubernetes.io/component"]


def selected(selector: Manifest, manifests: list[Manifest]) -> list[Manifest]:
    """Return the workloads whose pods match a label selector."""

    def fits(labels: dict[str, str]) -> bool:
        wanted = selector.get("matchLabels", {}).items()
        expressions = selector.get("matchExpressions", [])
        assert all(one["operator"] == "In" for one in expressions)
        return wanted <= labels.items() and all(labels.get(one["key"]) in one["values"] for one in expressions)

    return [workload for workload in workloads(manifests) if fits(labels_of(workload))]


def environment(container: Manifest, manifests: list[Manifest]) -> dict[str, str]:
    """Return the environment that the container's process would have; values from the pod or a Secret get stand-ins."""
    env: dict[str, str] = {}
    for source in container.get("envFrom", []):
        env |= named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        stand_ins = {
            "status.podIP": "10.1.2.3",
            "metadata.name": "tandem-decode-5d4f7c9b8-x2x4z",
            "tandem-redis": "redis://somewhere:6379/0",
            "tandem-gateway": "a-key",
            "tandem-router": "another-key",
            "tandem-hub": "a token",
        }
        path = source.get("fieldRef", {}).get("fieldPath") or source.get("secretKeyRef", {}).get("name")
        env[entry["name"]] = stand_ins[path] if path else entry["value"]
    return env


def flags_of(container: Manifest, manifests: list[Manifest]) -> dict[str, Any]:
    module, args = program_of(container)
    env = environment(container, manifests)
    args = [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], arg) for arg in args]
    return parsed(module, args, env)


def program_of(container: Manifest) -> tuple[str, list[str]]:
    """Return module and arguments. They go to the image's entry point, since no container sets its own command."""
    assert "command" not in container
    args: list[str] = container["args"]
    image = container["image"].rpartition(":")[0].removeprefix("tandem/")
    return (args[0], args[1:]) if image.startswith("worker") else (image, args)


def ours(manifests: list[Manifest]) -> list[tuple[Manifest, Manifest]]:
    """Deployments of our programs, with the container that runs the program."""
    return [(workload, pod_of(workload)["containers"][0]) for workload in of_kind(manifests, "Deployment")]


def port_of(flags: dict[str, Any], name: str = "listen") -> int:
    return int(flags[name].rpartition(":")[2])


def gib(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


def container_ports(workload: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for one in containers_of(workload) for port in one.get("ports", [])}
