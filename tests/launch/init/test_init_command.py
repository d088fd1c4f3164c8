"""`slurmllm init` as a command: questions, files, refusals; and the default cluster."""

import json
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import answer, call, printed, refused
from fake_slurm import FakeSlurm

from slurmllm.core.config.schema import schema_line
from slurmllm.core.slurm import client
from slurmllm.launch.diagnose import login_node, ok

GPUS = """\
GresTypes=gpu
Name=gpu Type=h100 File={folder}/gpu[0-7]
NodeName=n1 CPUs=4 Gres=gpu:h100:8 Feature=h100,ib
NodeName=n2 CPUs=4 Gres=gpu:h100:8 Feature=h100,ib
PartitionName=gpu Nodes=n[1-2] MaxTime=2-00:00:00 DefMemPerCPU=100
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "config"
    monkeypatch.setenv("SLURMLLM_CONFIG", str(folder / "config.yaml"))
    return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    slurm = FakeSlurm()
    slurm.gres = "gpu:v100:4"
    monkeypatch.setattr(client, "SlurmClient", lambda: slurm)
    return slurm


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `doctor`, not the processes that import torch and lm_eval."""
    monkeypatch.setattr(login_node, "import_torch", lambda: "imported 2.13.0 None")
    monkeypatch.setattr(login_node, "private_names_finding", lambda: ok("private APIs", ""))


def init(*arguments: str, text: str | None = None) -> Result:
    return call("init", *arguments, input=text)


def chosen_profile(*arguments: str) -> str:
    return str(answer(call("recipes", "tiny_neox", "--json", *arguments))["cluster"]["name"])


def test_profile_and_default(home: Path, fake: FakeSlurm) -> None:
    shown = printed(init("--yes"))
    assert "figures     guess: the GPU v100 has no shipped profile" in shown
    assert "slurmllm calibrate --nodes 2 --out measured.yaml" in shown
    assert (home / "config.yaml").read_text() == "cluster: fake-main.yaml\n"
    first = (home / "fake-main.yaml").read_text().splitlines()[0]
    assert first == schema_line("cluster").strip()
    assert chosen_profile() == "fake-main"
    assert "fake-main, by " + str(home) in call("doctor", "--json").stdout


def test_nothing_is_replaced_without_force(home: Path, fake: FakeSlurm) -> None:
    home.mkdir()
    profile = home / "fake-main.yaml"
    profile.write_text("extends: p5\n")
    assert "exists; --force replaces it, --out FILE.yaml writes another" in refused(init("--yes"))
    done = init(text="n\n")  # one partition: no question for it
    assert (done.exit_code, profile.read_text()) == (0, "extends: p5\n")
    assert f"replace {profile}? [y/N]" in done.stderr
    assert init("--force").exit_code == 0
    assert "extends: a100_ib" in profile.read_text()


def test_another_default_cluster_stays_unless_the_user_agrees(
    home: Path, fake: FakeSlurm, tmp_path: Path
) -> None:
    home.mkdir()
    configuration = home / "config.yaml"
    configuration.write_text("# mine\ncluster: p5  # for now\ndata_folder: /fsx/data\n")
    out = tmp_path / "mine.yaml"
    done = init("--yes", "--out", str(out))
    assert (done.exit_code, chosen_profile()) == (0, "p5")
    assert f"next        slurmllm doctor --cluster {out}" in done.stdout
    out.unlink()
    assert init("--out", str(out), text="y\ny\n").exit_code == 0
    assert configuration.read_text() == f"# mine\ncluster: {out}\ndata_folder: /fsx/data\n"
    assert chosen_profile() == "mine"


def test_order_of_the_default_cluster(
    home: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert chosen_profile() == "local"
    assert init("--yes").exit_code == 0
    assert chosen_profile() == "fake-main"
    # On this machine the profile of the Slurm cluster is not meant.
    local = ("submit", "tiny_neox", "--local", "--dry-run", "--json", f"--runs-dir={tmp_path}")
    dry = call(*local, "--data=builtin")
    assert json.loads(dry.stdout)["config"]["cluster"]["name"] == "local"
    monkeypatch.setenv("SLURMLLM_CLUSTER", "p4d")
    assert chosen_profile() == "p4d"
    assert chosen_profile("--cluster=h100_ib") == "h100_ib"
    assert "$SLURMLLM_CLUSTER=p4d goes before it" in init("--force").stdout


def test_a_faulty_configuration(home: Path, fake: FakeSlurm) -> None:
    home.mkdir()
    configuration = home / "config.yaml"
    for text, message in (
        ("cluster: 5\n", "cluster: 5 must be a profile's name or a .yaml file"),
        ("cluster: gone.yaml\n", "config.yaml, which names it"),
        ("clusters: p5\n", "unknown field 'clusters'; it may set cluster, data,"),
    ):
        configuration.write_text(text)
        done = call("recipes", "tiny_neox")
        assert (done.exit_code, message in done.stderr) == (2, True), done.output
    configuration.write_text("cluster: p5\n")
    configuration.chmod(configuration.stat().st_mode | stat.S_IWOTH)  # others may write it
    assert call("recipes", "tiny_neox").exit_code == 2
    # One of another form is left alone.
    configuration.unlink()
    configuration.write_text("{data_folder: /fsx}\n")
    assert "write into it: cluster: fake-main.yaml" in refused(init("--yes"))
    assert configuration.read_text() == "{data_folder: /fsx}\n"


def test_without_slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "no Slurm here: scontrol is not on the PATH" in refused(init("--yes"), 3)
    assert not home.exists()


def test_a_dry_run_writes_nothing(home: Path, fake: FakeSlurm) -> None:
    done = init("--dry-run", "--json")
    assert (done.exit_code, home.exists()) == (0, False)
    shown = json.loads(done.stdout)
    assert (shown["profile"]["written"], shown["default"]) == (False, False)
    assert shown["figures"]["confidence"] == "guess"
    assert (init("--out=mine.txt").exit_code, init("--partition=x").exit_code) == (2, 2)


@pytest.fixture(scope="module")
def gpu_site(
    new_cluster: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("gpus")
    for number in range(8):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    (folder / "conf").write_text(GPUS.format(folder=folder))
    cluster = new_cluster(folder / "state")
    cluster.call("up", "--nodes=3", f"--conf={folder}/conf")
    yield cluster.slurm_conf
    cluster.call("down")


@pytest.mark.slurm
def test_a_real_site_with_gpus(
    gpu_site: str, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", gpu_site)
    assert "no terminal to ask on; add --yes" in init(text="").stderr
    done = init(text="gpu\ny\n")
    assert done.exit_code == 0, done.output
    (choices,) = re.findall(r"partition \((.*)\) \[gpu\]: ", done.stderr)
    assert {*choices.split(", ")} == {"main", "gpu", "urgent"}
    runs = f"--runs-dir={tmp_path}"
    checks = {c["name"]: c for c in json.loads(call("doctor", "--json", runs).stdout)["checks"]}
    assert {checks[name]["state"] for name in ("profile", "limits", "CPUs", "devices")} == {"ok"}
    profile = json.loads(call("recipes", "tiny_neox", "--json").stdout)["cluster"]
    assert (profile["devices_per_node"], profile["partition"]) == (8, "gpu")
    assert profile["directives"] == ["--gpus-per-node=8", "--mem=0"]
    shown = json.loads(init("--json", "--dry-run", "--partition=main").stdout)
    assert shown["figures"]["profile"] == "h100_ib"
    partitions = {row["name"]: row for row in shown["partitions"]}
    assert partitions["gpu"]["time_limit"] == "2-00:00:00"
    kinds = [(kind["nodes"], kind["gpus"]) for kind in partitions["main"]["kinds"]]
    assert kinds == [(["n1", "n2"], 8), (["n3"], 0)]
    assert shown["associations"][0]["account"] == "root"
