"""The manifests, as kubectl renders them, are valid for Kubernetes and fit our programs.

The tests need no cluster. They look up every reference (a port, a selector, a probe's service name, a flag, a Secret)
where it is defined.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from dockerfile import PROJECT, ROOT, STAGES
from manifests import (
    K8S,
    OVERLAYS,
    Manifest,
    component_of,
    container_ports,
    containers_of,
    environment,
    flags_of,
    gib,
    kustomize,
    labels_of,
    named,
    of_kind,
    ours,
    pod_of,
    port_of,
    program_of,
    rendered,
    selected,
    workloads,
)
from programs import HEALTH_SERVICES, PROGRAMS

VERSIONS = ["1.30", "1.37"]
"""The oldest version that we promise to support, and the newest whose schemas we have."""
FOREIGN = {"PodMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, for which Kubernetes has no schemas."""
FROM_OUTSIDE = {"production": {"tandem-redis": {"url"}}}
"""Secrets that the operator must create before (the overlay's first lines say how), with their keys."""
HTTP_PATHS = {"/health", "/version", "/metrics"}
COMPONENTS = ["monitoring", "autoscaling", "rdma", "redis", "tracing", "other-models"]

pytestmark = pytest.mark.skipif(kustomize is None, reason="neither kubectl nor kustomize is here")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the overlays, and "with-everything": production plus the components that its file comments out."""
    folder = tmp_path_factory.mktemp("k8s") / "with-everything"
    shutil.copytree(K8S / "overlays" / "production", folder)
    path = folder / "kustomization.yaml"
    text = path.read_text().replace("# - ../../components/", "- ../../components/")
    path.write_text(text.replace("../../", f"{os.path.relpath(K8S, folder.resolve())}/"))
    return {name: K8S / "overlays" / name for name in OVERLAYS} | {"with-everything": folder}


@pytest.fixture(params=[*OVERLAYS, "with-everything"])
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifests(overlay: str, folders: dict[str, Path]) -> list[Manifest]:
    return rendered(folders[overlay])


# -- Kubernetes' own rules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [*(pytest.param(v, marks=pytest.mark.slow) for v in VERSIONS[:-1]), VERSIONS[-1]])
def test_manifests_are_valid(version: str, folders: dict[str, Path]) -> None:
    everything = [one for folder in folders.values() for one in rendered(folder) if one["kind"] not in FOREIGN]
    distinct = {json.dumps(one | {"metadata": {}}, sort_keys=True): one for one in everything}
    assert len(distinct) > 20
    for manifest in distinct.values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_everything_is_in_one_namespace_and_named_once(manifests: list[Manifest]) -> None:
    (namespace,) = of_kind(manifests, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = [manifest for manifest in manifests if manifest is not namespace]
    assert {one["metadata"]["namespace"] for one in others} == {namespace["metadata"]["name"]}
    keys = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(keys) == len(set(keys))


def test_every_file_is_used() -> None:
    values = K8S / "components" / "autoscaling" / "prometheus-adapter-values.yaml"
    for path in set(K8S.rglob("*.yaml")) - {values}:
        if path.name != "kustomization.yaml":
            assert re.search(rf"\b{path.name}\b", (path.parent / "kustomization.yaml").read_text()), path
    used = "".join(path.read_text() for path in K8S.glob("overlays/*/kustomization.yaml"))
    assert all(f"../../components/{name}\n" in used for name in COMPONENTS)


def test_overlays_hold_what_they_are_for(overlay: str, manifests: list[Manifest]) -> None:
    components = {component_of(workload) for workload in workloads(manifests)}
    everything = {"router", "gateway", "prefill", "decode", "model"}
    is_production = overlay in ("production", "with-everything")
    assert components == {
        "cpu-demo": everything | {"redis"},
        "single-gpu-node": everything - {"prefill"} | {"redis"},
    }.get(overlay, everything)
    gpus = [c["resources"]["limits"].get("nvidia.com/gpu") for workload in workloads(manifests)
            for c in containers_of(workload) if workload["kind"] == "Deployment"]  # fmt: skip
    assert sum(filter(None, gpus)) == {"cpu-demo": 0, "single-gpu-node": 1}.get(overlay, 2)
    assert bool(of_kind(manifests, "HorizontalPodAutoscaler", *FOREIGN)) == is_production
    (budgets, deployments) = (of_kind(manifests, kind) for kind in ("PodDisruptionBudget", "Deployment"))
    assert {one["metadata"]["name"] for one in budgets} == {one["metadata"]["name"] for one in deployments}


# -- pods --------------------------------------------------------------------------------------------------------------


def test_pods_may_do_nothing_that_they_need_not(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        pod = pod_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # else TANDEM_ROUTER_PORT=tcp://… would look like our setting
        assert named(manifests, "ServiceAccount", pod["serviceAccountName"])
        for container in containers_of(workload):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= container["resources"].keys()
            assert "memory" in container["resources"]["limits"]
            image, _, tag = container["image"].rpartition(":")
            if image.startswith("tandem/"):
                assert image.removeprefix("tandem/") in STAGES
                assert tag == PROJECT["project"]["version"]
                assert f"{pod['securityContext']['runAsUser']}" in STAGES["runtime"].all("USER")[0]
            else:
                assert re.match(r"\d+\.\d+\.\d+", tag)


def test_what_pods_refer_to_is_there(overlay: str, manifests: list[Manifest]) -> None:
    outside = FROM_OUTSIDE.get("production" if overlay == "with-everything" else overlay, {})
    for workload in workloads(manifests):
        volumes = {volume["name"]: volume for volume in pod_of(workload)["volumes"]}
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert named(manifests, "PersistentVolumeClaim", claim["claimName"])
        for container in containers_of(workload):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            for entry in container.get("env", []):
                secret = entry.get("valueFrom", {}).get("secretKeyRef")
                if secret is None or secret.get("optional"):
                    continue
                in_cluster = {one["metadata"]["name"]: set(one["stringData"] if "stringData" in one else one["data"])
                              for one in of_kind(manifests, "Secret")}  # fmt: skip
                assert secret["key"] in (outside | in_cluster)[secret["name"]]


def test_programs_take_their_flags_and_settings(manifests: list[Manifest]) -> None:
    for workload, container in ours(manifests):
        flags = flags_of(container, manifests)
        module, args = program_of(container)
        assert module in {"router": "router", "gateway": "gateway", "prefill": "prefill_service",
                          "decode": "decode_service"}[component_of(workload)]  # fmt: skip
        # A program listens on the port that its container declares, under the name that others use.
        ports = container_ports(workload)
        assert ports.pop("http" if module == "gateway" else "grpc") == port_of(flags)
        metrics = [arg.rpartition(":")[2] for arg in args if arg.startswith("--metrics-listen=")]
        assert list(map(int, metrics)) == list(ports.values())
        assert flags["listen"].startswith("0.0.0.0:")
        if "advertise" in flags:
            assert flags["advertise"] == f"10.1.2.3:{port_of(flags)}"
            assert flags["worker_id"].startswith("tandem-")
        if "redis" in flags:
            assert flags["redis"] == "redis://somewhere:6379/0"
            limits = container["resources"]["limits"]
            if "cpu" in limits and "num_threads" in flags:
                assert flags["num_threads"] == int(limits["cpu"])
                assert environment(container, manifests)["OMP_NUM_THREADS"] == limits["cpu"]


def test_workers_agree_on_what_kv_is(overlay: str, manifests: list[Manifest]) -> None:
    workers = [flags_of(container, manifests) for workload, container in ours(manifests)
               if component_of(workload) in ("prefill", "decode")]  # fmt: skip
    router = next(flags_of(container, manifests) for one, container in ours(manifests) if component_of(one) == "router")
    for flags in workers:
        for name in ("model", "dtype", "block_size", "transport", "served_model_name", "max_model_len"):
            assert flags[name] == workers[0][name]
        assert flags["model"] == router["model"]
        assert flags["device"] == ("cpu" if overlay == "cpu-demo" else "cuda")
        assert flags["transport"] == ("nixl" if overlay == "with-everything" else "grpc")


def test_the_model_is_where_programs_look(manifests: list[Manifest]) -> None:
    (job,) = of_kind(manifests, "Job")
    (container,) = containers_of(job)
    (script,) = container["args"]
    (module,) = re.findall(r"-m ([\w.]+)", script)
    assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()
    env = environment(container, manifests)
    assert set(re.findall(r"\$([A-Z_]+)", script)) <= set(env)
    (name,) = re.findall(r'name="(.*)"', script)
    for workload, program in ours(manifests):
        mounts = {mount["name"]: mount for mount in program["volumeMounts"]}
        if component_of(workload) == "gateway":
            continue
        assert flags_of(program, manifests)["model"] == name.replace("$", "").replace(
            "TANDEM_SERVED_MODEL_NAME", env["TANDEM_SERVED_MODEL_NAME"]
        )
        written = next(mount for mount in container["volumeMounts"] if mount["name"] == "models")
        assert mounts["models"] == written | {"readOnly": True}  # at the same path, since it contains links
        (wait,) = pod_of(workload)["initContainers"]
        assert f"{name}/config.json" in wait["args"][0]
        assert wait["image"] == program["image"]
    assert env["HOME"] == written["mountPath"]


def test_workers_have_shared_memory(manifests: list[Manifest]) -> None:
    for workload, container in ours(manifests):
        if component_of(workload) in ("prefill", "decode"):
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            (volume,) = [one for one in pod_of(workload)["volumes"] if one["name"] == mounts["/dev/shm"]]
            assert volume["emptyDir"]["medium"] == "Memory"
            assert gib(volume["emptyDir"]["sizeLimit"]) < gib(container["resources"]["limits"]["memory"])


def test_workers_that_move_kv_over_rdma_have_a_device_for_it(folders: dict[str, Path]) -> None:
    """An overlay's own patches come after those of its components, and can undo them."""
    manifests = rendered(folders["with-everything"])
    for workload, container in ours(manifests):
        if component_of(workload) in ("prefill", "decode"):
            assert flags_of(container, manifests)["transport"] == "nixl"
            limits = container["resources"]["limits"]
            assert limits == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 1, "rdma/hca_shared_devices_a": 1}


# -- life and death ----------------------------------------------------------------------------------------------------


def test_probes_ask_what_programs_answer(manifests: list[Manifest]) -> None:
    for workload, container in ours(manifests):
        module, _ = program_of(container)
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
        ports = container_ports(workload)
        for kind, probe in probes.items():
            if module == "gateway":
                assert probe["httpGet"]["path"] in HTTP_PATHS
                assert probe["httpGet"]["port"] == "http"
                continue
            service = probe["grpc"].get("service", "")
            assert probe["grpc"]["port"] == ports["grpc"]
            assert service in HEALTH_SERVICES[module]
            # Readiness depends on other processes, so it must not decide about killing or starting a pod.
            assert bool(service) == (kind == "readiness")
        assert probes["liveness"] != probes["readiness"]


def test_graces_fit_into_each_other(manifests: list[Manifest]) -> None:
    lease_s = max(flags_of(container, manifests).get("lease_ms", 0) for _, container in ours(manifests)) / 1000
    assert lease_s > 0
    for workload, container in ours(manifests):
        drain_s = flags_of(container, manifests)["drain_grace_s"]
        pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pause_s > 0
        assert drain_s >= lease_s
        assert pod_of(workload)["terminationGracePeriodSeconds"] >= pause_s + drain_s + lease_s + 5


def test_pods_are_spread_and_kept(manifests: list[Manifest]) -> None:
    for deployment in of_kind(manifests, "Deployment"):
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels_of(deployment).items()
        assert selected(deployment["spec"]["selector"], manifests) == [deployment]
        constraints = pod_of(deployment)["topologySpreadConstraints"]
        assert {one["topologyKey"] for one in constraints} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        for one in constraints:
            assert selected(one["labelSelector"], manifests) == [deployment]
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert [one["metadata"]["name"] for one in selected(budget["spec"]["selector"], manifests)] == [
            budget["metadata"]["name"]
        ]


# -- who talks to whom -------------------------------------------------------------------------------------------------

ARROWS = {
    ("gateway", "router"),
    ("router", "prefill"),
    ("router", "decode"),
    ("prefill", "decode"),
    ("router", "redis"),
    ("prefill", "redis"),
    ("decode", "redis"),
}
"""docs/architecture.md"""


def test_services_lead_to_ports_that_are_listened_on(manifests: list[Manifest]) -> None:
    for service in of_kind(manifests, "Service"):
        (workload,) = selected({"matchLabels": service["spec"]["selector"]}, manifests)
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in container_ports(workload)


def test_programs_ask_services_that_are_there(overlay: str, manifests: list[Manifest]) -> None:
    (gateway,) = [flags_of(container, manifests) for one, container in ours(manifests)
                  if component_of(one) == "gateway"]  # fmt: skip
    own, *of_other_models = gateway["router"]
    host, _, port = own.rpartition(":")
    routers = named(manifests, "Service", host)["spec"]
    assert int(port) in [one["port"] for one in routers["ports"]]
    assert routers.get("clusterIP") == "None", "a gateway would know one router, and stay with it"
    assert routers["publishNotReadyAddresses"], "gateways ask each router by themselves whether it can serve"
    assert of_other_models == ([f"{host}.tandem-small:{port}"] if overlay == "with-everything" else [])
    for secret in of_kind(manifests, "Secret"):
        if secret["metadata"]["name"] == "tandem-redis":
            url = base64.b64decode(secret["data"]["url"]).decode()
            (host, port) = re.fullmatch(r"redis://([\w-]+):(\d+)/0", url).groups()  # type: ignore[union-attr]
            assert int(port) in [one["port"] for one in named(manifests, "Service", host)["spec"]["ports"]]


def allowed(manifests: list[Manifest], direction: str, peer_key: str) -> set[tuple[str, str, int]]:
    """Return (one, other, port): the policies of pods `one` allow connections with pods `other` in `direction`."""
    found = set()
    for policy in of_kind(manifests, "NetworkPolicy"):
        subjects = selected(policy["spec"]["podSelector"], manifests)
        for rule in policy["spec"].get(direction, []):
            for peer in rule.get(peer_key, []):
                if "podSelector" in peer and "namespaceSelector" not in peer:
                    for other in selected(peer["podSelector"], manifests):
                        for port in rule["ports"]:
                            found |= {(component_of(one), component_of(other), port["port"]) for one in subjects}
    return found


def test_policies_let_through_the_arrows_and_nothing_else(overlay: str, manifests: list[Manifest]) -> None:
    listening = {component_of(workload): container_ports(workload) for workload in workloads(manifests)}
    there = {(a, b) for a, b in ARROWS if a in listening and b in listening}
    name = {"gateway": "http", "redis": "redis"}
    wanted = {(a, b, listening[b][name.get(b, "grpc")]) for a, b in there}
    if overlay == "with-everything":
        roles = ("prefill", "decode")
        wanted |= {(a, b, 32768) for a in roles for b in roles}
    assert allowed(manifests, "egress", "to") == wanted
    assert {(b, a, port) for a, b, port in allowed(manifests, "ingress", "from")} == wanted


def test_everybody_is_under_a_policy_that_lets_nothing_through(manifests: list[Manifest]) -> None:
    policy = named(manifests, "NetworkPolicy", "tandem-default")["spec"]
    assert selected(policy["podSelector"], manifests) == workloads(manifests)
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    assert "ingress" not in policy
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53}


def test_only_the_front_doors_are_open_to_others(overlay: str, manifests: list[Manifest]) -> None:
    """Checks the rules that name no pod of ours: who may connect from elsewhere, and where our pods may connect to."""
    into, out_of = {}, {}
    for policy in of_kind(manifests, "NetworkPolicy"):
        name = policy["metadata"]["name"].removeprefix("tandem-")
        for rule in policy["spec"].get("ingress", []):
            if not all("podSelector" in peer and len(peer) == 1 for peer in rule.get("from", [{}])):
                into[name] = [port["port"] for port in rule["ports"]]
        for rule in policy["spec"].get("egress", []):
            if not all("podSelector" in peer for peer in rule.get("to", [{}])):
                out_of[name] = [port["port"] for port in rule["ports"]]
    ports = {component_of(workload): container_ports(workload) for workload in of_kind(manifests, "Deployment")}
    is_production = overlay in ("production", "with-everything")
    doors = {"gateway": [ports["gateway"]["http"]], "router": [ports["router"]["grpc"]]}
    assert into == doors | ({"metrics": [ports["router"]["metrics"]]} if is_production else {})
    outside = {"default": [53, 53], "model": [443]}
    redis = {name: [6379] for name in ("router", "prefill", "decode")}
    traces = {"traces": [4317]} if overlay == "with-everything" else {}
    assert out_of == outside | (redis if is_production else {}) | traces


def test_gateways_reach_the_routers_of_other_models(folders: dict[str, Path]) -> None:
    """The routers of other models are deployed as ours are, in other namespaces."""
    manifests = rendered(folders["with-everything"])
    (rule,) = named(manifests, "NetworkPolicy", "tandem-other-models")["spec"]["egress"]
    (peer,) = rule["to"]
    assert peer["namespaceSelector"] == {}
    (router,) = selected(peer["podSelector"], manifests)
    assert rule["ports"] == [{"port": container_ports(router)["grpc"]}]
    doors = named(manifests, "NetworkPolicy", "tandem-router")["spec"]["ingress"][0]["from"]
    (open_to,) = [peer["podSelector"]["matchLabels"] for peer in doors if peer.get("namespaceSelector") == {}]
    (gateway,) = [workload for workload in workloads(manifests) if component_of(workload) == "gateway"]
    assert open_to.items() <= labels_of(gateway).items()


def test_who_tells_of_requests_reaches_the_collector(folders: dict[str, Path]) -> None:
    manifests = rendered(folders["with-everything"])
    policy = named(manifests, "NetworkPolicy", "tandem-traces")["spec"]
    (rule,) = policy["egress"]
    namespace = rule["to"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    tellers = {component_of(one) for one in selected(policy["podSelector"], manifests)}
    assert tellers == {"router", "gateway"}
    for workload, container in ours(manifests):
        if component_of(workload) in tellers:
            endpoint = flags_of(container, manifests)["otlp_traces_endpoint"]
            assert endpoint.endswith(f".{namespace}:{rule['ports'][0]['port']}")


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_monitors_find_metrics(overlay: str, manifests: list[Manifest]) -> None:
    monitors = of_kind(manifests, "PodMonitor")
    scraped = {}
    for monitor in monitors:
        (workload,) = selected(monitor["spec"]["selector"], manifests)
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] in HTTP_PATHS
        scraped[component_of(workload)] = container_ports(workload)[endpoint["port"]]
    if overlay in ("production", "with-everything"):
        assert set(scraped) == {"router", "gateway", "prefill", "decode"}
        policy = named(manifests, "NetworkPolicy", "tandem-metrics")["spec"]
        let_in = {component_of(one) for one in selected(policy["podSelector"], manifests)}
        assert let_in == set(scraped) - {"gateway"}  # the gateway's port is open to all
        assert {scraped[name] for name in let_in} == {port["port"] for port in policy["ingress"][0]["ports"]}


def test_autoscalers_ask_for_what_the_adapter_offers() -> None:
    manifests = rendered(K8S / "overlays" / "production")
    rules = yaml.safe_load((K8S / "components/autoscaling/prometheus-adapter-values.yaml").read_text())["rules"]
    offered = {kind: {rule["name"]["as"]: rule for rule in rules[kind]} for kind in ("external", "custom")}
    asked = {}
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        deployment = named(manifests, target["kind"], target["name"])
        assert "replicas" not in deployment["spec"]  # otherwise every apply would reset the number
        (metric,) = scaler["spec"]["metrics"]
        kind = metric["type"]
        name = metric[kind.lower()]["metric"]["name"]
        rule = offered[{"External": "external", "Pods": "custom"}[kind]][name]
        asked[component_of(deployment)] = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
        needed = {"namespace"} if kind == "External" else {"namespace", "pod"}
        assert set(rule["resources"]["overrides"]) == needed
    assert asked == {"prefill": ["tandem:queue_tokens"], "decode": ["tandem:kv_cache_usage_perc"]}


def test_every_program_is_deployed() -> None:
    modules = {program_of(container)[0] for _, container in ours(rendered(K8S / "overlays" / "cpu-demo"))}
    assert modules == set(PROGRAMS)
