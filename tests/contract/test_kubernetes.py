"""The manifests of deploy/kubernetes: legal for Kubernetes, and in agreement with the broker."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest

from sparklog import limits
from sparklog.settings import BrokerSettings, load_settings
from sparklog.storage.objects import open_store
from tests.support import containers, fences

VERSIONS: Final = ("1.31", "1.34", "1.37")
NAMESPACE: Final = "logs"
APP: Final = {"app.kubernetes.io/name": "sparklog"}


def settings_of(
    monkeypatch: pytest.MonkeyPatch, ordinal: int, *, zone: str = "eu-1a", **more: str
) -> BrokerSettings:
    """The settings of a broker in the pod with that ordinal."""
    monkeypatch.setattr(
        "sparklog.settings.loading.socket.gethostname", lambda: f"sparklog-{ordinal}"
    )
    given = containers.environment_of(ordinal, namespace=NAMESPACE, zone=zone)
    return load_settings(None, given | more, {})


def stateful_set() -> dict[str, Any]:
    """The specification of the StatefulSet."""
    found: dict[str, Any] = containers.manifests()["StatefulSet", "sparklog"]["spec"]
    return found


# ------------------------------------------------------------------------------ the schemas


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_legal(version: str) -> None:
    """Each object has the fields of Kubernetes' schema, and no other ones."""
    assert len(containers.manifests()) == 6
    for manifest in containers.manifests().values():
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


def test_schema_is_strict() -> None:
    """A misspelt field of a container is refused, so the test above can fail."""
    wrong = copy.deepcopy(containers.manifests()["StatefulSet", "sparklog"])
    broker = wrong["spec"]["template"]["spec"]["containers"][0]
    broker["readynessProbe"] = broker.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_folder_has_manifests_only() -> None:
    """`kubectl apply` takes all files of the folder."""
    assert {path.suffix for path in containers.manifest_files()} == {".yaml"}
    folder = f"{containers.MANIFESTS.relative_to(fences.ROOT)}/"
    assert f"kubectl apply --filename {folder}\n" in containers.PAGE.read_text("utf-8")


def test_page_names_the_objects() -> None:
    """The commands of the page are about objects of these files."""
    page = containers.PAGE.read_text("utf-8")
    commands = "\n".join(re.findall(r"kubectl .*", page))
    assert {*re.findall(r"statefulset/([\w-]+)", commands)} == {"sparklog"}
    assert re.findall(r"set image \S+ (\w+)=", commands) == [containers.container()["name"]]
    assert re.findall(r"--selector (\S+)=(\S+)", commands) == [*APP.items()]
    assert {*re.findall(r" (sparklog-\d+)", commands)} == {"sparklog-0"}
    files = set(re.findall(r"^\| `([\w.]+\.yaml)` \|", page, re.MULTILINE))
    assert files == {path.name for path in containers.manifest_files()}


# ------------------------------------------------------------------------------ the settings


@pytest.mark.parametrize("ordinal", [0, 1, 2, 11])
def test_broker_of_a_pod(monkeypatch: pytest.MonkeyPatch, ordinal: int) -> None:
    """Its id is its ordinal, and it advertises the name that the headless Service gives it."""
    settings = settings_of(monkeypatch, ordinal)
    service = stateful_set()["serviceName"]
    host = f"sparklog-{ordinal}.{service}.{NAMESPACE}.svc"
    assert settings.id == ordinal
    assert settings.kafka.advertised == f"{host}:9092"
    assert settings.flight.advertised == f"{host}:8815"
    assert settings.cluster.join
    assert settings.cluster.rack == "eu-1a"
    assert settings.root.startswith("s3://")


def test_node_without_a_zone_gives_no_rack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets the variable to nothing where a pod lacks the label."""
    assert settings_of(monkeypatch, 0, zone="").cluster.rack == ""


def test_variables_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable that begins like a setting is one, and the store knows its options.

    Kubernetes' own variables for the Services are let pass, where a pod has them.
    """
    given = containers.environment_of(0, namespace=NAMESPACE, zone="")
    assert containers.unknown_variables(given) == set()
    links = {
        "SPARKLOG_BOOTSTRAP_SERVICE_HOST": "10.0.0.1",
        "SPARKLOG_BOOTSTRAP_SERVICE_PORT_KAFKA": "9092",
        "SPARKLOG_BOOTSTRAP_PORT": "tcp://10.0.0.1:9092",
        "SPARKLOG_BOOTSTRAP_PORT_9092_TCP": "tcp://10.0.0.1:9092",
    }
    settings = settings_of(monkeypatch, 0, **links)
    open_store(settings.root, settings.storage)


def test_sources_of_variables_exist() -> None:
    """The ConfigMap is one of the files, and a pod starts without the Secret."""
    for source in containers.container()["envFrom"]:
        if "configMapRef" in source:
            assert ("ConfigMap", source["configMapRef"]["name"]) in containers.manifests()
        else:
            assert source["secretRef"]["optional"]
            assert source["secretRef"]["name"] in containers.PAGE.read_text("utf-8")
    account = containers.pod()["spec"]["serviceAccountName"]
    assert ("ServiceAccount", account) in containers.manifests()


# ------------------------------------------------------------------------------ ports and names


def listened(settings: BrokerSettings) -> dict[str, int]:
    """The ports at which the broker listens, under the names of the manifests."""
    (kafka,), (flight,) = settings.kafka.listeners, settings.flight.listeners
    assert settings.metrics.listener is not None
    return {"kafka": kafka.port, "flight": flight.port, "http": settings.metrics.listener.port}


def test_ports_are_those_of_the_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers, Services and probes name the ports that the broker opens."""
    settings = settings_of(monkeypatch, 0)
    open_ports = listened(settings)
    named = {each["name"]: each["containerPort"] for each in containers.container()["ports"]}
    assert named == open_ports
    for name in ("sparklog", "sparklog-bootstrap"):
        ports = containers.manifests()["Service", name]["spec"]["ports"]
        assert {"kafka", "flight"} <= {each["name"] for each in ports}
        for each in ports:
            assert each["targetPort"] == each["name"]
            # The address of a pod has no Service in between that could change the port.
            assert each["port"] == open_ports[each["name"]]
    for advertised, name in (
        (settings.kafka.advertised, "kafka"),
        (settings.flight.advertised, "flight"),
    ):
        assert int(advertised.rpartition(":")[2]) == open_ports[name]
    assert {
        each.host for each in (*settings.kafka.listeners, settings.metrics.listener) if each
    } == {
        "0.0.0.0"  # the kubelet is another host
    }


def test_clients_log_in_over_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the certificate of a Secret, which the page creates, for the names of the brokers."""
    settings = settings_of(monkeypatch, 0)
    listeners = (*settings.kafka.listeners, *settings.flight.listeners)
    assert {each.protocol for each in listeners} == {"SASL_SSL"}
    assert settings.security.anonymous == "loopback"
    (secret,) = (each for each in containers.pod()["spec"]["volumes"] if "secret" in each)
    (mount,) = (
        each for each in containers.container()["volumeMounts"] if each["name"] == secret["name"]
    )
    assert mount["readOnly"] is True
    page = containers.PAGE.read_text("utf-8")
    create = f"kubectl create secret generic {secret['secret']['secretName']}"
    files = re.findall(r"--from-file keys/(\S+)", page.partition(create)[2].partition("\n")[0])
    assert [f"{mount['mountPath']}/{each}" for each in files] == [
        settings.tls.certificate,
        settings.tls.key,
    ]
    # The files belong to the group of the pod.
    assert containers.pod()["spec"]["securityContext"]["fsGroup"] == 1000
    assert secret["secret"]["defaultMode"] == 0o440
    host = settings.kafka.advertised.partition(":")[0].partition(".")[2]
    assert f"--host '*.{host.replace(NAMESPACE, 'NAMESPACE')}'" in page


def test_probes_ask_the_paths_of_the_broker() -> None:
    """Readiness is that of the listeners; liveness and the start are those of the process."""
    broker = containers.container()
    probes = {
        name: broker[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }


def test_services_find_the_pods() -> None:
    """Everything that selects pods selects the brokers."""
    found = containers.manifests()
    assert containers.pod()["metadata"]["labels"] == APP
    assert stateful_set()["selector"]["matchLabels"] == APP
    assert found["PodDisruptionBudget", "sparklog"]["spec"]["selector"]["matchLabels"] == APP
    for name in ("sparklog", "sparklog-bootstrap"):
        assert found["Service", name]["spec"]["selector"] == APP
    for each in containers.pod()["spec"]["topologySpreadConstraints"]:
        assert each["labelSelector"]["matchLabels"] == APP


def test_names_of_brokers_are_there_before_they_are_ready() -> None:
    """The Service of the StatefulSet is headless, and clients have one of ready brokers."""
    spec = containers.manifests()["Service", stateful_set()["serviceName"]]["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True
    bootstrap = containers.manifests()["Service", "sparklog-bootstrap"]["spec"]
    assert "publishNotReadyAddresses" not in bootstrap
    assert "clusterIP" not in bootstrap


# ------------------------------------------------------------------------------ the life of a pod


def test_brokers_start_together_and_leave_one_by_one() -> None:
    """A start waits for no other broker; one at a time is evicted, and has time to stop."""
    assert stateful_set()["replicas"] == 3
    assert stateful_set()["podManagementPolicy"] == "Parallel"
    budget = containers.manifests()["PodDisruptionBudget", "sparklog"]["spec"]
    assert budget["maxUnavailable"] == 1
    seconds = containers.pod()["spec"]["terminationGracePeriodSeconds"]
    assert seconds > limits.STOP_SECONDS + limits.DRAIN_SECONDS


def test_pod_writes_to_its_mounts_only() -> None:
    """The user is the image's and not root, and the loops are kept in a folder that is mounted."""
    pod, broker = containers.pod()["spec"], containers.container()
    (user,) = containers.instructions("USER")
    assert pod["securityContext"]["runAsUser"] == int(user) != 0
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert broker["securityContext"]["readOnlyRootFilesystem"] is True
    assert broker["securityContext"]["allowPrivilegeEscalation"] is False
    assert broker["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    volumes = {each["name"] for each in pod["volumes"] if "emptyDir" in each}
    mounts = {Path(each["mountPath"]) for each in broker["volumeMounts"] if each["name"] in volumes}
    given = containers.environment_of(0, namespace=NAMESPACE, zone="")
    assert mounts & {*Path(given["NUMBA_CACHE_DIR"]).parents}
    assert Path("/tmp") in mounts  # Python's temporary files
