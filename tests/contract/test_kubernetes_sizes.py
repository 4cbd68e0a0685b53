"""The manifests ask for no more than the nodes have that docs/deploy.md names, and wait as long as pods may take."""

from __future__ import annotations

import re

import pytest
import yaml
from dockerfile import ROOT
from manifests import K8S, OVERLAYS, Manifest, containers_of, kustomize, named, of_kind, pod_of, rendered, workloads

OF_KUBERNETES = 1.0
"""Cores that the pods of Kubernetes itself ask for on the only node: 950m with kind, 750m with minikube."""

pytestmark = pytest.mark.skipif(kustomize is None, reason="neither kubectl nor kustomize is here")


def cores_of(workload: Manifest) -> float:
    """Of one pod. One that waits in an init container asks for as much as later."""
    asked = [container["resources"]["requests"]["cpu"] for container in pod_of(workload)["containers"]]
    return sum(float(each[:-1]) / 1000 if each.endswith("m") else float(each) for each in asked)


def test_the_demo_fits_a_node_of_four_cores_also_while_it_is_replaced() -> None:
    (cores,) = re.findall(r"^\| `cpu-demo` .*\| (\d+) cores", (ROOT / "docs/deploy.md").read_text(), flags=re.MULTILINE)
    manifests = rendered(K8S / "overlays" / "cpu-demo")
    replaced = [each for each in workloads(manifests) if each["kind"] == "Deployment"]
    at_most = sum(map(cores_of, workloads(manifests))) + max(map(cores_of, replaced)) + OF_KUBERNETES
    assert at_most <= float(cores)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_rollout_waits_for_as_long_as_a_pod_may_take_to_start(overlay: str) -> None:
    manifests = rendered(K8S / "overlays" / overlay)
    for deployment in of_kind(manifests, "Deployment"):
        if "initContainers" not in pod_of(deployment):
            continue  # it waits for no model
        (container,) = containers_of(deployment)[-1:]
        probe = container.get("startupProbe", {"periodSeconds": 0, "failureThreshold": 0})
        may_take_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert deployment["spec"]["progressDeadlineSeconds"] >= may_take_s + 1200, "and fetching the model"


def test_the_adapter_asks_the_prometheus_that_the_monitors_are_for() -> None:
    values = yaml.safe_load((K8S / "components/autoscaling/prometheus-adapter-values.yaml").read_text())
    where = named(rendered(K8S / "overlays" / "production"), "NetworkPolicy", "tandem-metrics")["spec"]["ingress"]
    namespace = where[0]["from"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert values["prometheus"]["url"] == f"http://prometheus-operated.{namespace}.svc"
