"""Checks of packages: installed, absent, too old, or a placeholder of the public index."""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from launch.diagnose.conftest import health

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.records import Finding
from slurmllm.launch.diagnose import login_node

ROOT = Path(__file__).resolve().parents[3]
PINNED = {name: pinned for name, (_, _, pinned) in login_node.NEURON_PACKAGES.items()}


def profile(name: str) -> Cluster:
    return resolve("tiny_neox", name).cluster


def distributions(
    monkeypatch: pytest.MonkeyPatch, folder: Path, versions: Mapping[str, str]
) -> None:
    """Make an environment of these distributions alone, as their metadata on disk."""
    for name, version in versions.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    finder = importlib.metadata.MetadataPathFinder()

    def installed_version(name: str) -> str | None:
        context = importlib.metadata.DistributionFinder.Context(name=name, path=[str(folder)])
        return next((versions.version for versions in finder.find_distributions(context)), None)

    monkeypatch.setattr(login_node, "installed_version", installed_version)


def modules(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))


def neuron(
    monkeypatch: pytest.MonkeyPatch, folder: Path, changed: Mapping[str, str]
) -> dict[str, Finding]:
    modules(monkeypatch, folder, *(module for module, _, _ in login_node.NEURON_PACKAGES.values()))
    distributions(monkeypatch, folder, {**PINNED, **changed})
    return {finding.check: finding for finding in login_node.neuron_findings()}


def test_nxd_of_the_next_release_warns_and_one_of_another_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = neuron(
        monkeypatch,
        tmp_path,
        {"neuronx-distributed": "0.18.27753", "neuronx-cc": "2.24.5133.0", "torch-xla": "2.90.0"},
    )
    assert versions["neuronx-distributed"].status == "warn"
    assert versions["neuronx-cc"].status == "fail"
    assert versions["neuronx-cc"].value == "2.24.5133.0; supported: 2.23.*"
    assert versions["torch-xla"].status == "fail"  # 2.90 is not of 2.9
    assert versions["libneuronxla"].status == versions["torch-neuronx"].status == "ok"


def test_an_empty_package_of_the_public_index_is_called_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules(monkeypatch, tmp_path, "torch_xla", "torch_neuronx", "neuronxcc", "libneuronxla")
    monkeypatch.setitem(
        login_node.NEURON_PACKAGES,
        "neuronx-distributed",
        ("no_such_neuronx_distributed", ("0.17",), "0.17.26814"),
    )
    distributions(monkeypatch, tmp_path, {**PINNED, "neuronx-distributed": "0.1"})
    versions = {finding.check: finding for finding in login_node.neuron_findings()}[
        "neuronx-distributed"
    ]
    assert versions.status == "fail"
    assert "placeholder" in str(versions.value)
    assert "pip uninstall neuronx-distributed" in versions.fix


@pytest.mark.parametrize(
    ("message", "device", "state"),
    [
        (f"imported {login_node.TESTED_TORCH}+cpu None", "local", "ok"),
        ("imported 2.10.1 None", "local", "warn"),
        ("imported 2.8.0 None", "local", "fail"),
        ("ImportError: libtorch.so: no such file", "local", "fail"),
        (None, "local", "warn"),
        (f"imported {login_node.TESTED_TORCH} None", "p4d", "fail"),
        ("imported 2.9.1 12.8", "trn1", "ok"),
        (f"imported {login_node.TESTED_TORCH} None", "trn1", "fail"),
    ],
)
def test_torch_is_judged_by_what_the_profile_needs(
    monkeypatch: pytest.MonkeyPatch, message: str | None, device: str, state: str
) -> None:
    monkeypatch.setattr(login_node, "import_torch", lambda: message)
    monkeypatch.setattr(login_node, "installed_version", lambda name: "present")
    assert login_node.torch_finding(profile(device)).status == state


def test_absent_packages_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    required = ["click>=8.1", "rich>=13", "gone>=1", "torch>=2.9", "ruff>=0.6; extra == 'dev'"]
    assert login_node.packages_finding().status == "ok"
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    distributions(monkeypatch, tmp_path, {"slurmllm": "0.1", "click": "8.1", "rich": "13"})
    finding = login_node.packages_finding()
    assert (finding.status, finding.value) == ("fail", "missing: gone")


def test_the_compiler_is_the_one_that_training_would_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert login_node.compiler_finding().status == "warn"
    monkeypatch.setenv("CXX", "sh")
    assert login_node.compiler_finding().status == "ok"


def test_the_tested_torch_is_the_pinned_one() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"torch=={login_node.TESTED_TORCH}\n" in pins


def test_a_profile_that_no_job_runs_with_fails() -> None:
    local = profile("local")
    broken = local.model_copy(update={"setup": ("if true",)})
    states = [login_node.profile_finding(p, "x").status for p in (local, broken, profile("trn2"))]
    assert states == ["ok", "fail", "fail"]


def test_a_container_is_checked_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_node, "installed_version", lambda name: None)
    monkeypatch.setattr(login_node, "packages_finding", lambda: login_node.ok("packages", ""))
    image, slurm = tmp_path / "image.sif", FakeSlurm()
    for device in ("trn1", "p5"):
        container = {"runtime": "pyxis", "image": str(image)}
        cluster = resolve("tiny_neox", device, [f"cluster.container={container}"]).cluster
        states = {f.check: f.status for f in login_node.installation_findings(cluster)}
        assert "fail" not in states.values()
        assert states["torch"] == "skipped"
    (finding,) = login_node.container_findings(cluster, slurm)
    assert (finding.status, str(image) in str(finding.value)) == ("fail", True)
    image.touch()
    (finding,) = login_node.container_findings(cluster, slurm)
    assert finding.status == "ok"
    slurm.refuse_srun = "unrecognized option '--container-image'"
    (finding,) = login_node.container_findings(cluster, slurm)
    assert (finding.status, "pyxis must be installed" in finding.fix) == ("fail", True)
    monkeypatch.setenv("PATH", str(tmp_path))
    overrides = [f"cluster.container={container | {'runtime': 'apptainer'}}"]
    cluster = resolve("tiny_neox", "p5", overrides).cluster
    assert next(login_node.container_findings(cluster, slurm)).status == "warn"
    assert not list(login_node.container_findings(resolve("tiny_neox").cluster, slurm))


def test_a_machine_that_is_fit(tmp_path: Path) -> None:
    small = "--set=cluster.health.min_node_local_gb=0"
    text = health(tmp_path / "runs", "--local", "--no-bandwidth", "--nodes=2", small)
    assert text.startswith("cluster profile local\nnode    state  CPUs")
    assert "local1" in text
    assert "0 fail" in text.splitlines()[-1]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_machine_that_lacks_something(tmp_path: Path) -> None:
    unfit = "--set=cluster.node_local=/nowhere"
    finding = json.loads(health(tmp_path, "--local", "--no-bandwidth", unfit, "--json", code=3))
    findings = {f["check"]: f for f in finding["nodes"]["local0"]["findings"]}
    disk = findings["node-local disk"]
    assert (finding["exit_code"], disk["status"]) == (3, "fail")
    assert disk["message"].startswith("/nowhere does not exist; is the disk mounted?")
    assert findings["memory"]["value"] > 0
    assert finding["nodes"]["local0"]["versions"]["torch"]


def test_the_all_reduce_against_a_floor_that_nobody_reaches(tmp_path: Path) -> None:
    floor = ("--set=cluster.health.min_allreduce_gb_s=100000",)
    text = health(tmp_path, "--local", "--nodes=3", *floor, "--json", code=3)
    nodes: dict[str, Any] = json.loads(text)["nodes"]
    for node in nodes.values():
        (finding,) = (f for f in node["findings"] if f["check"] == "all-reduce")
        assert 0 < finding["value"] < 100000
        assert "GB/s with the faster of its neighbours" in finding["message"]
