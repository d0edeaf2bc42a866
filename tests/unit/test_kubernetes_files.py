"""docker/kubernetes/: what no cluster is needed for. The manifests render, the API's schemas accept them, the settings
that a pod writes load, and names and addresses are those of the example topology."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tao.cli.commands import tao
from tao.follower.settings import FollowerSettings
from tao.leader.settings import LeaderSettings
from tao.model.topology import Topology
from tao.runtime.process import ProcessSettings
from tao.runtime.settings import parse_settings
from tao.schema.registry import load_schema
from tao.tailer.settings import TailerSettings
from tao.topology.document import dump_topology, parse_topology
from tao.watcher.settings import WatcherSettings
from tao.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "kubernetes"
REGIONS = ("east", "west")
RENDERED = (*(f"overlays/{region}" for region in REGIONS), "etcd", "setup")
ROLES: dict[str, type[Any]] = {
    "follower": FollowerSettings,
    "leader": LeaderSettings,
    "tailer": TailerSettings,
    "watcher": WatcherSettings,
    "worker": WorkerSettings,
}
PASSWORDS = {
    "follower": {"reader_password": "r"},
    "leader": {"leader_password": "l", "reader_password": "r"},
    "tailer": {"password": "p"},
    "watcher": {"administrator_password": "w", "replicator_password": "p"},
    "worker": {},
}
OLDEST_API = "1.29.0"
NEWEST_API = kubernetes_validate.latest_version()
OLDEST_KUBECTL = (1, 26)
"""Earlier ones do not know some fields of the kustomization files."""
DRAIN_SECONDS = 60

Manifest = dict[str, Any]


@cache
def kubectl_trouble() -> str:
    """Why nothing can be rendered here, or ""."""
    if shutil.which("kubectl") is None:
        return "there is no kubectl"
    shown = subprocess.run(["kubectl", "version", "--client", "--output=json"], capture_output=True, check=True).stdout
    version = json.loads(shown)["clientVersion"]
    found = (int(version["major"]), int(re.match(r"\d+", version["minor"])[0]))  # type: ignore[index]
    return "" if found >= OLDEST_KUBECTL else f"kubectl {found[0]}.{found[1]} is too old"


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    if trouble := kubectl_trouble():
        pytest.skip(trouble)
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(name: str, kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in rendered(name) if each["kind"] == kind}


def example_topology() -> Topology:
    return parse_topology((FOLDER / "topology.example.json").read_bytes(), "topology.example.json")


def role_of(workload: Manifest) -> str:
    role: str = workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
    return role


def pods(region: str) -> Iterator[tuple[str, Manifest]]:
    for name, workload in of_kind(f"overlays/{region}", "StatefulSet").items():
        for ordinal in range(workload["spec"]["replicas"]):
            yield f"{name}-{ordinal}", workload


def every_pod() -> list[tuple[str, Manifest]]:
    """Every pod's name, and its template: of servers, of etcd, and of the task that sets up."""
    kinds = ("StatefulSet", "Job")
    return [
        (name, each["spec"]["template"]["spec"])
        for folder in RENDERED
        for kind in kinds
        for name, each in of_kind(folder, kind).items()
    ]


@pytest.mark.parametrize(
    ("name", "version"),
    [("overlays/east", OLDEST_API), ("overlays/east", NEWEST_API), ("etcd", NEWEST_API), ("setup", NEWEST_API)],
)
def test_the_manifests_render_and_the_schemas_of_the_api_accept_them(name: str, version: str) -> None:
    for manifest in rendered(name):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_pods_are_the_servers_of_the_example_topology_at_its_addresses() -> None:
    topology = example_topology()
    assert dump_topology(topology) == (FOLDER / "topology.example.json").read_text()
    listed = {server.name: server.grpc.rsplit(":")[0] for _, server in topology.cache_servers}
    for each in topology.regions:
        listed |= {tailer.name: tailer.admin.rsplit(":")[0] for tailer in each.tailers}
        listed |= {watcher.name: watcher.admin.rsplit(":")[0] for watcher in each.watchers}
    found = {}
    for region in REGIONS:
        services = of_kind(f"overlays/{region}", "Service")
        for name, workload in pods(region):
            if role_of(workload) == "worker":
                continue  # nobody connects to one
            service = services[workload["spec"]["serviceName"]]["metadata"]
            found[name] = f"{name}.{service['name']}.{service['namespace']}.svc.cluster.local"
    assert found == listed


@pytest.mark.parametrize("region", REGIONS)
def test_a_server_is_found_by_name_before_it_is_ready_and_applications_find_ready_followers(region: str) -> None:
    services = of_kind(f"overlays/{region}", "Service")
    for workload in of_kind(f"overlays/{region}", "StatefulSet").values():
        spec = services.pop(workload["spec"]["serviceName"])["spec"]
        assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
        assert spec["selector"] == workload["spec"]["selector"]["matchLabels"]
    (followers,) = services.values()
    assert followers["spec"]["selector"]["app.kubernetes.io/component"] == "follower"
    assert {port["port"] for port in followers["spec"]["ports"]} == {7000, 7001}


def written_settings(folder: Path, pod: str, region: str, workload: Manifest) -> object:
    """Run the script of the init container on the files that its volumes have."""
    role, spec = role_of(workload), workload["spec"]["template"]["spec"]
    maps = of_kind(f"overlays/{region}", "ConfigMap")
    (init,) = spec["initContainers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in init["volumeMounts"]:
        place = folder / mount["mountPath"].lstrip("/")
        place.mkdir(parents=True)
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            for file, text in maps[volume["configMap"]["name"]]["data"].items():
                (place / file).write_text(text)
        elif "secret" in volume:
            assert volume["secret"]["secretName"] == f"tao-{role}"
            if PASSWORDS[role]:
                (place / "settings.yaml").write_text(yaml.safe_dump(PASSWORDS[role]).rstrip())
    shell, option, script = init["command"]
    environment = {"TAO_NAME": pod, "TAO_ROLE": role, **maps[init["envFrom"][0]["configMapRef"]["name"]]["data"]}
    script = script.replace("/etc/tao", f"{folder}/etc/tao").replace("/run/tao", f"{folder}/run/tao")
    subprocess.run([shell, option, script], env=environment, check=True)
    file = folder / "run" / "tao" / "settings.yaml"
    assert file.stat().st_mode & 0o077 == 0
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("region", REGIONS)
def test_the_settings_that_a_pod_writes_load_and_use_tls_and_the_credentials_of_its_role(
    region: str, tmp_path: Path
) -> None:
    schema = load_schema((ROOT / "config" / "schema.yaml").read_text(), "schema.yaml")
    arenas = ({each.arena for each in schema.objects} | {each.arena for each in schema.assocs}) - {"default"}
    for pod, workload in pods(region):
        role = role_of(workload)
        settings = parse_settings(written_settings(tmp_path / pod, pod, region, workload), ROLES[role], pod)
        (server,) = workload["spec"]["template"]["spec"]["containers"]
        mounts = {mount["mountPath"] for mount in server["volumeMounts"]}
        assert settings.name == pod
        assert str(settings.topology_file).startswith("etcd:")
        assert settings.tls.if_set is not None
        files = [settings.token_file, settings.tls.certificate, settings.tls.private_key, settings.tls.authorities]
        if role not in ("tailer", "worker"):
            files.append(settings.accepted_tokens_file)
        if role in ("leader", "follower"):
            assert not settings.insecure
            assert set(settings.arena_mb) == arenas
            files.append(settings.access_file)
        assert {str(file.parent) for file in files} <= mounts
        if role in ("leader", "follower", "tailer"):
            (claim,) = workload["spec"]["volumeClaimTemplates"]
            (place,) = (each for each in server["volumeMounts"] if each["name"] == claim["metadata"]["name"])
            kept = {
                "leader": lambda found: found.spool.folder,
                "follower": lambda found: found.journal.folder,
                "tailer": lambda found: found.state_folder,
            }[role](settings)
            assert kept.parent == Path(place["mountPath"])


def test_a_tailer_reads_the_database_server_that_the_topology_gives_it() -> None:
    topology = example_topology()
    for region in topology.regions:
        (map_,) = (each for name, each in of_kind(f"overlays/{region.name}", "ConfigMap").items() if "-region-" in name)
        for tailer in region.tailers:
            (database,) = (each for each in topology.databases if each.name == tailer.database)
            settings = yaml.safe_load(map_["data"][f"{tailer.name}.yaml"])
            assert settings == {"database_server": database.servers[region.name].name}


@pytest.mark.parametrize("region", REGIONS)
def test_probes_ask_the_admin_port_and_a_paused_server_is_not_killed(region: str) -> None:
    for _, workload in pods(region):
        (server,) = workload["spec"]["template"]["spec"]["containers"]
        pages = {probe: server[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
        assert {probe: page["path"] for probe, page in pages.items()} == {
            "startup": "/health", "liveness": "/health", "readiness": "/ready"
        }  # fmt: skip
        assert {page["port"] for page in pages.values()} == {"admin"}
        assert server["livenessProbe"]["periodSeconds"] * server["livenessProbe"]["failureThreshold"] >= 60


@pytest.mark.parametrize("name", [name for name in RENDERED if name != "setup"])
def test_of_each_tier_one_pod_may_be_missing_and_no_two_are_on_one_node(name: str) -> None:
    budgets = of_kind(name, "PodDisruptionBudget")
    for workload_name, workload in of_kind(name, "StatefulSet").items():
        selector = workload["spec"]["selector"]
        budget = budgets.pop(workload_name)["spec"]
        assert (budget["maxUnavailable"], budget["selector"]) == (1, selector)
        assert workload["spec"]["replicas"] >= 2
        spec = workload["spec"]["template"]["spec"]
        (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule == {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
    assert budgets == {}


@pytest.mark.parametrize("region", REGIONS)
def test_leaders_and_followers_are_drained_before_they_end_and_put_back_when_they_serve(region: str) -> None:
    bounds = ProcessSettings()
    for _, workload in pods(region):
        spec = workload["spec"]["template"]["spec"]
        (server,) = spec["containers"]
        grace = spec["terminationGracePeriodSeconds"]
        assert grace > DRAIN_SECONDS + bounds.drain_seconds + bounds.close_seconds
        if role_of(workload) not in ("leader", "follower"):
            assert "lifecycle" not in server
            continue
        hooks = {hook: how["exec"]["command"] for hook, how in server["lifecycle"].items()}
        for hook, command in (("preStop", "drain"), ("postStart", "undrain")):
            shell, option, script = hooks[hook]
            assert (shell, option) == ("/bin/sh", "-c")
            call = re.search(r"\btao (\w+) (.*? --yes)", script)
            assert call is not None
            assert call[1] == command
            tao.commands[command].make_context(command, call[2].replace('"', "").split(), resilient_parsing=False)
        assert f"--timeout {DRAIN_SECONDS} " in hooks["preStop"][2]
        assert hooks["postStart"][2].endswith("; true")  # a hook that fails has its container killed


def test_pods_run_without_root_without_rights_and_cannot_write_their_image() -> None:
    for name, spec in every_pod():
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
            }  # fmt: skip
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert set(container["resources"]["limits"]) == {"memory"}


def test_pods_run_as_the_account_of_the_image() -> None:
    uid = re.search(r"useradd .*--uid (\d+)", (ROOT / "docker" / "Dockerfile").read_text())
    assert uid is not None
    ours = [spec for name, spec in every_pod() if name.startswith("tao-")]
    assert {spec["securityContext"]["runAsUser"] for spec in ours} == {int(uid[1])}
    assert {each["image"] for spec in ours for each in spec["containers"]} == {"tao-graph:latest"}


def test_no_secret_stands_in_a_manifest() -> None:
    for name in RENDERED:
        assert of_kind(name, "Secret") == {}
        for manifest in of_kind(name, "ConfigMap").values():
            text = "\n".join(manifest["data"].values())
            assert re.findall(r"(?im)^\s*\w*(?:password|token|secret)\s*:", text) == []
    for _, spec in every_pod():
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert [each for each in container.get("env", ()) if "PASSWORD" in each["name"]] == []


@pytest.mark.parametrize("region", REGIONS)
def test_each_role_mounts_its_own_secrets_only(region: str) -> None:
    for _, workload in pods(region):
        volumes = workload["spec"]["template"]["spec"]["volumes"]
        role = role_of(workload)
        secrets = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
        assert secrets == {f"tao-{role}", f"tao-{role}-certificate", "tao-accepted-tokens"}


@pytest.mark.parametrize("region", REGIONS)
def test_strangers_reach_the_ports_of_followers_alone(region: str) -> None:
    policies = of_kind(f"overlays/{region}", "NetworkPolicy").values()
    open_to_all = [(each, rule) for each in policies for rule in each["spec"]["ingress"] if "from" not in rule]
    ((policy, rule),) = open_to_all
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "follower"
    assert [port["port"] for port in rule["ports"]] == ["grpc", "frames"]


def test_the_setup_makes_accounts_then_tables_then_replication() -> None:
    (job,) = of_kind("setup", "Job").values()
    spec = job["spec"]["template"]["spec"]
    commands = [container["args"] for container in (*spec["initContainers"], *spec["containers"])]
    assert [command[0] for command in commands] == ["accounts", "migrate", "replicate"]
    for command in commands:
        tao.commands[command[0]].make_context(command[0], command[1:], resilient_parsing=True)


def test_all_files_name_one_topology() -> None:
    maps = [
        each["data"]["TAO_TOPOLOGY"]
        for name in RENDERED
        for each in of_kind(name, "ConfigMap").values()
        if "TAO_TOPOLOGY" in each["data"]
    ]
    assert len(maps) == len(REGIONS) + 1
    assert len(set(maps)) == 1
