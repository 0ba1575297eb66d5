"""The Kubernetes manifests agree with each other, with the image and with the programs."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from absl import flags

from bandmf_tf.simulation import config as run_config
from cases import ROOT
from production import train_federated  # noqa: F401 (defines its flags)

FOLDER = ROOT / "production" / "kubernetes"


def _documents() -> dict[tuple[str, str], dict]:
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            found[document["kind"], document["metadata"]["name"]] = document
    return found


DOCUMENTS = _documents()
PODS = {
    name: DOCUMENTS[name]["spec"]["template"]
    for name in (("Job", "bandmf-train"), ("StatefulSet", "bandmf-workers"))
}


def _train_flags() -> dict[str, str]:
    (container,) = PODS["Job", "bandmf-train"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "production.train_federated"]
    return dict(re.fullmatch(r"--(\w+)=(.*)", word).groups() for word in container["args"])


def test_the_program_knows_its_flags_and_its_configuration():
    given = _train_flags()
    assert given.keys() <= set(flags.FLAGS)
    values = yaml.safe_load(DOCUMENTS["ConfigMap", "bandmf-train"]["data"]["run.yaml"])
    config = run_config.RunConfig(**values, mechanism=given["mechanism"], output=given["output"])
    # The plan of the init container covers the run and goes where the program looks.
    (planner,) = PODS["Job", "bandmf-train"]["spec"]["initContainers"]
    words = shlex.split(planner["args"][0].replace("\\\n", " "))
    assert f"--num_rounds={config.num_rounds}" in words
    (folder,) = [word.removeprefix("--output=") for word in words if word.startswith("--output=")]
    assert f"{folder}/mechanism.bandmf" == config.mechanism


def test_the_program_names_every_worker():
    workers = DOCUMENTS["StatefulSet", "bandmf-workers"]
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    script, tls, port = container["command"]
    assert tls in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert (ROOT / script).stat().st_mode & 0o111
    service = DOCUMENTS["Service", workers["spec"]["serviceName"]]
    assert [str(entry["port"]) for entry in service["spec"]["ports"]] == [port]
    expected = [
        f"{workers['metadata']['name']}-{number}.{service['metadata']['name']}:{port}"
        for number in range(workers["spec"]["replicas"])
    ]
    assert _train_flags()["workers"].split(",") == expected


def test_only_the_program_reaches_workers():
    policy = DOCUMENTS["NetworkPolicy", "bandmf-workers"]["spec"]
    workers = PODS["StatefulSet", "bandmf-workers"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == workers
    (rule,) = policy["ingress"]
    (allowed,) = rule["from"]
    program = PODS["Job", "bandmf-train"]["metadata"]["labels"]
    assert allowed["podSelector"]["matchLabels"] == program
    assert policy["egress"] == []
    # Nobody reaches the program, whose own worker has no network of its own in a pod.
    policy = DOCUMENTS["NetworkPolicy", "bandmf-train"]["spec"]
    assert policy["podSelector"]["matchLabels"] == program
    assert (policy["policyTypes"], policy["ingress"]) == (["Ingress"], [])


def test_one_pod_at_a_time_owns_the_run_folder():
    job = DOCUMENTS["Job", "bandmf-train"]["spec"]
    assert (job["parallelism"], job["completions"]) == (1, 1)
    claim = DOCUMENTS["PersistentVolumeClaim", "bandmf-run"]["spec"]
    assert claim["accessModes"] == ["ReadWriteOncePod"]
    # Otherwise Kubernetes makes secrets readable by the group, and the program refuses them.
    security = job["template"]["spec"]["securityContext"]
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"


@pytest.mark.parametrize("name", PODS, ids=lambda name: name[0])
def test_pods_are_selected_by_their_labels_mount_what_exists_and_share_an_image(name):
    spec = PODS[name]["spec"]
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    containers = spec["containers"] + spec.get("initContainers", [])
    for container in containers:
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
    assert {container["image"] for container in containers} == {"registry.example.com/bandmf:0.1.0"}
    selector = DOCUMENTS[name]["spec"].get("selector")
    assert selector is None or selector["matchLabels"] == PODS[name]["metadata"]["labels"]


def test_the_image_copies_what_exists():
    instructions = (FOLDER / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (.*) \S+$", instructions, re.MULTILINE)
    assert len(copied) >= 4
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path


def test_the_program_has_the_memory_of_every_line_of_the_table():
    (container,) = PODS["Job", "bandmf-train"]["spec"]["containers"]
    memory = {kind: amounts["memory"] for kind, amounts in container["resources"].items()}
    assert memory["requests"] == memory["limits"]
    allowed = int(memory["limits"].removesuffix("Gi")) * 2**30
    text = (ROOT / "production" / "README.md").read_text()
    rows = re.findall(r"^\| [\d,]+ \| \d+ \|.* (\S+) MB \|.* (\S+) MB \|.*\|$", text, re.M)
    needed = [sum(1e6 * int(megabytes.replace(",", "")) for megabytes in row) for row in rows]
    assert len(needed) >= 4
    assert max(needed) < allowed


def test_the_help_that_messages_advise_is_there():
    # A process of its own: absl defines these flags once, and other tests may have put flags back.
    command = [sys.executable, "-m", "production.train_federated", "--helpfull"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert "--[no]allow_open_worker" in shown


# On one machine.

UNIT = ROOT / "production" / "systemd" / "bandmf-train.service"


def _unit() -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text().replace("\\\n", " "))
    return {name: dict(parser[name]) for name in parser.sections()}


def test_the_unit_starts_the_program_with_flags_that_it_knows():
    service = _unit()["Service"]
    python, *words = shlex.split(service["ExecStart"])
    assert python == f"{service['WorkingDirectory']}/.venv/bin/python"
    assert words[:2] == ["-m", "production.train_federated"]
    given = dict(re.fullmatch(r"--(\w+)=(.*)", word).groups() for word in words[2:])
    assert given.keys() <= set(flags.FLAGS)
    # What it writes to is writable, though the rest of the system is not.
    assert service["ProtectSystem"] == "strict"
    assert given["output"].startswith(f"/var/lib/{service['StateDirectory']}/")
    assert given["anchor"].startswith(f"/var/log/{service['LogsDirectory']}/")


def test_the_unit_goes_on_after_a_crash_and_not_after_a_stop():
    unit = _unit()
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["SuccessExitStatus"] == "130"
    assert "RestrictNamespaces" not in unit["Service"]  # The worker needs one.
    assert unit["Service"]["LimitCORE"] == "0"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_understands_the_unit(tmp_path):
    text = re.sub(r"^(User|Group)=.*$", "", UNIT.read_text(), flags=re.MULTILINE)
    text = text.replace("/opt/bandmf/.venv/bin/python", sys.executable)
    path = tmp_path / UNIT.name
    path.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", path]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    complaints = [line for line in found.stderr.splitlines() if UNIT.name in line]
    assert complaints == []
