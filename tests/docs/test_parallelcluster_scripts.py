"""The nodes' scripts: health.sh on a pretended node, neuron.sh as far as no node is needed."""

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "parallelcluster"


class Node:
    """A folder that stands for / on a trn1 node, and a scontrol that writes down its words."""

    def __init__(self, root: Path, instance: str = "trn1.32xlarge", links: int = 8) -> None:
        self.root = root
        self.write("sys/devices/virtual/dmi/id/product_name", instance)
        for chip in range(16):
            self.write(f"dev/neuron{chip}", "")
            for kind in ("mem", "sram"):
                self.write(self.counter(chip, kind), "0")
        for link in range(links):
            self.write(f"sys/class/infiniband/rdmap{link}s0/name", "")
        self.mount("rw,relatime")
        self.answers = root / "said"
        self.write("bin/scontrol", f'#!/bin/sh\nprintf "%s\\n" "$@" >{self.answers}\n')
        (root / "bin" / "scontrol").chmod(0o755)

    def counter(self, chip: int, kind: str) -> str:
        folder = f"sys/devices/virtual/neuron_device/neuron{chip}"
        return f"{folder}/stats/hardware/{kind}_ecc_uncorrected"

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def mount(self, options: str, point: str = "/scratch") -> None:
        self.write(
            "proc/mounts", f"/dev/root / ext4 rw 0 0\n/dev/vg.01 {point} ext4 {options} 0 0\n"
        )

    def health(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "SLURMLLM_HEALTH_ROOT": str(self.root),
            "SLURMD_NODENAME": "trn1-dy-1",
        }
        return subprocess.run(
            [FOLDER / "health.sh", *arguments],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip

    def faults(self) -> str:
        return self.health("show").stdout.strip()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_sound_node_is_left_alone_and_one_that_lacks_a_chip_drained(node: Node) -> None:
    done = node.health()
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert not node.answers.exists()
    assert node.health("show").returncode == 0
    (node.root / "dev" / "neuron7").unlink()
    assert node.health().returncode == 0
    assert node.answers.read_text().splitlines() == [
        "update", "NodeName=trn1-dy-1", "State=DRAIN",
        "Reason=slurmllm health: 15 of 16 Neuron chips",
    ]  # fmt: skip
    assert node.health("show").returncode == 1


def test_links_are_counted_by_the_type_of_the_instance(node: Node, tmp_path: Path) -> None:
    (node.root / "sys/class/infiniband/rdmap3s0/name").unlink()
    (node.root / "sys/class/infiniband/rdmap3s0").rmdir()
    assert node.faults() == "7 of 8 EFA links"
    assert Node(tmp_path / "n", "trn1n.32xlarge", links=16).faults() == ""
    assert Node(tmp_path / "m", "trn1n.32xlarge", links=8).faults() == "8 of 16 EFA links"


@pytest.mark.parametrize(
    ("options", "point", "message"),
    [
        ("rw,relatime", "/scratch", ""),
        ("relatime,rw", "/scratch", ""),
        ("rw,errors=remount-ro", "/scratch", ""),
        ("ro,relatime", "/scratch", "/scratch is read-only"),
        ("relatime,ro", "/scratch", "/scratch is read-only"),
        ("rw", "/scratch2", "/scratch is not mounted"),
    ],
)
def test_the_local_disk(node: Node, options: str, point: str, message: str) -> None:
    node.mount(options, point)
    assert node.faults() == message


def test_memory_errors_and_all_faults_at_once(node: Node) -> None:
    node.write(node.counter(4, "mem"), "3\n")
    node.mount("rw", "/elsewhere")
    assert node.faults().splitlines() == [
        "/scratch is not mounted", "neuron4: mem_ecc_uncorrected 3",
    ]  # fmt: skip
    node.health()
    assert "is not mounted; neuron4: mem" in node.answers.read_text()


def test_a_driver_without_counters_is_no_fault(node: Node) -> None:
    (node.root / node.counter(0, "sram")).unlink()
    assert node.faults() == ""


@pytest.mark.parametrize("script", ["health.sh", "neuron.sh"])
def test_an_unknown_word_is_refused(script: str) -> None:
    done = subprocess.run([FOLDER / script, "nod"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split(":")[0]) == (2, "usage")


def test_an_environment_is_not_made_over_another(tmp_path: Path) -> None:
    done = subprocess.run(
        [FOLDER / "neuron.sh", "python", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "exists; remove it" in done.stderr


def test_the_environment_is_made_of_the_pinned_versions_from_awss_index(tmp_path: Path) -> None:
    """With a python3 that writes down what it is asked to do."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    # `-m venv DIR` makes DIR/bin/python, a copy of itself.
    python.write_text(
        f'#!/bin/sh\nprintf "%s " "$@" >>{tmp_path}/said\necho >>{tmp_path}/said\n'
        'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi\n'
    )
    python.chmod(0o755)
    venv = tmp_path / "venv"
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    subprocess.run([FOLDER / "neuron.sh", "python", venv], env=environment, check=True)
    constraints = (venv / "neuron-constraints.txt").read_text().splitlines()
    install = (tmp_path / "said").read_text().splitlines()[-1].split()
    assert install[:5] == [
        "-m", "pip", "install", "--extra-index-url", "https://pip.repos.neuron.amazonaws.com",
    ]  # fmt: skip
    assert install[5:] == constraints
    assert all("==" in line for line in constraints)
