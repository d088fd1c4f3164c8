"""configs/parallelcluster: against ParallelCluster's own schema and validators, and our profiles.

The schema needs the package aws-parallelcluster, which is best kept in a venv of its own:
SLURMLLM_PCLUSTER_PYTHON names the interpreter that has it (docs/developing/development.md).
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from present import present

from slurmllm.core.config.resolve import resolve
from slurmllm.launch.diagnose.login_node import NEURON_PACKAGES
from slurmllm.train.backends.nxd.environment import INSTANCES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "parallelcluster"
CONFIG = FOLDER / "trn1.yaml"
TEXT = CONFIG.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def python() -> str:
    named = os.environ.get("SLURMLLM_PCLUSTER_PYTHON")
    if named:
        assert shutil.which(named), f"SLURMLLM_PCLUSTER_PYTHON: no interpreter {named}"
        return named
    if importlib.util.find_spec("pcluster") is None:
        pytest.skip("aws-parallelcluster is not installed; SLURMLLM_PCLUSTER_PYTHON names a venv")
    return sys.executable


def check(python: str, path: Path) -> tuple[int, dict[str, list[str]]]:
    tool = ROOT / "tools" / "check_parallelcluster.py"
    done = subprocess.run(
        [python, str(tool), str(path), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def changed(folder: Path, old: str, new: str) -> Path:
    assert old in TEXT
    path = folder / "broken.yaml"
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    return path


def test_parallelcluster_takes_the_file(python: str) -> None:
    code, report = check(python, CONFIG)
    assert (code, report["errors"]) == (0, [])
    # The one warning that is meant: the file system outlives the cluster.
    assert [line.split(":")[0] for line in report["warnings"]] == ["DeletionPolicyValidator"]
    ran = {
        "EfaValidator", "EfaPlacementGroupValidator", "InstanceTypePlacementGroupValidator",
        "FsxStorageCapacityValidator", "DatabaseUriValidator", "CustomSlurmSettingsValidator",
        "SharedStorageMountDirValidator", "DuplicateMountDirValidator", "NameValidator",
    }  # fmt: skip
    assert ran <= set(report["ran"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("MaxCount: 8", "MaxCont: 8", "Unknown field"),
        ("subnet-replace0head00000", "subnet-REPLACE", "SubnetId"),
        ("StorageCapacity: 4800", "StorageCapacity: 4000", "FsxStorageCapacityValidator"),
        ("- JobRequeue: 1", "- SuspendTime: 60", "CustomSlurmSettingsValidator"),
        ("- JobRequeue: 1", "- AccountingStorageHost: x", "CustomSlurmSettingsValidator"),
        ("InstanceType: trn1.32xlarge", "InstanceType: m6i.4xlarge", "EfaValidator"),
        ("MountDir: /fsx", "MountDir: /etc", "SharedStorageMountDirValidator"),
        ("Name: trn1n\n", "Name: Trn1N\n", "NameValidator"),
        ("replace-database.cluster", "mysql://replace-database.cluster", "DatabaseUriValidator"),
        ("Enabled: true         # all eight links", "Enabled: false", "EfaValidator"),
    ],
)
def test_parallelcluster_refuses_a_broken_one(
    python: str, tmp_path: Path, old: str, new: str, message: str
) -> None:
    code, report = check(python, changed(tmp_path, old, new))
    messages = report["errors"] + (report["warnings"] if message == "EfaValidator" else [])
    assert any(message in line for line in messages), report
    assert code == (1 if report["errors"] else 0)


def queues() -> dict[str, dict[str, Any]]:
    return {queue["Name"]: queue for queue in yaml.safe_load(TEXT)["Scheduling"]["SlurmQueues"]}


@pytest.mark.parametrize("name", ["trn1", "trn1n"])
def test_a_queue_is_what_the_profile_of_its_name_says(name: str) -> None:
    queue, profile = queues()[name], resolve("tiny_neox", name).cluster
    (resource,) = queue["ComputeResources"]
    local = queue["ComputeSettings"]["LocalStorage"]
    assert resource["InstanceType"] == profile.instance_type
    assert local["EphemeralVolume"]["MountDir"] == profile.node_local
    assert resource["Efa"]["Enabled"] is True
    assert queue["Networking"]["PlacementGroup"]["Enabled"] is True
    assert resource["InstanceType"] in INSTANCES
    assert profile.partition in (None, name)


def test_every_placeholder_can_be_found_by_one_word() -> None:
    tree = yaml.safe_load(TEXT)
    assert "replace" in tree["HeadNode"]["Networking"]["SubnetId"]
    assert "replace" in tree["HeadNode"]["Ssh"]["KeyName"]
    database = tree["Scheduling"]["SlurmSettings"]["Database"]
    for place in (database["Uri"], database["PasswordSecretArn"]):
        assert "replace" in place
    for queue in tree["Scheduling"]["SlurmQueues"]:
        assert all("replace" in subnet for subnet in queue["Networking"]["SubnetIds"])
    assert not re.search(r"\b\d{12}\b", TEXT.replace("000000000000", ""))  # nobody's account


def test_the_scripts_that_the_nodes_fetch_install_what_doctor_and_the_page_name() -> None:
    names = set(re.findall(r"s3://\S+/slurmllm/(\S+)", TEXT))
    assert names == {path.name for path in FOLDER.glob("*.sh")}
    script = (FOLDER / "neuron.sh").read_text(encoding="utf-8")
    for distribution, (_, series, pinned) in NEURON_PACKAGES.items():
        assert f"\n  {distribution}=={pinned}\n" in script
        assert pinned.startswith(f"{series[0]}.")
    assert re.search(r"\n  torch==2\.9\.\d\n", script)
    port = present(resolve("tiny_neox", "trn1").cluster.master_port)
    assert f"RESERVED_PORTS={port}-{port + 1},62182" in script
    body = (ROOT / "sbatch" / "train.sbatch").read_text(encoding="utf-8")
    assert "ports=$SLURMLLM_MASTER_PORT-$((SLURMLLM_MASTER_PORT + 1)),62182" in body
    script = (FOLDER / "neuron.sh").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "parallelcluster.md").read_text(encoding="utf-8")
    section = page.split("## The Neuron environment")[1].split("\n## ")[0]
    packages = re.findall(r"^  [a-z-]+==(\S+)$", script, flags=re.M)
    system = re.findall(r"^(?:DRIVER|COLLECTIVES|RUNTIME|TOOLS)=(\S+)$", script, flags=re.M)
    assert len(packages) == 6
    assert len(system) == 4
    assert [version for version in (*packages, *system) if version not in section] == []
