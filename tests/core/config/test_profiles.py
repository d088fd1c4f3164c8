"""Cluster profiles that extend another: what they inherit, and what is refused."""

from pathlib import Path

import pytest

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig, change, resolve
from slurmllm.core.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "mine": "extends: p5\nhardware: {memory_gib: 139.8, memory_gb_s: 4800}\n",
        "other": "extends: mine.yaml\nname: other\nhealth: {efa_interfaces: 4}\nenv: null\n",
        "unknown": "# a comment\nextends: p55\n",
        "wrong": "extends: p5\nhardware: {assumed: [speed]}\n",
        "kept": "extends: p5\nhardware: {network_gb_s: 50, network_efficiency: 0.8}\n",
        "undated": "extends: p5\nprice: {on_demand: 2}\n",
        "partition": "extends: p5\npartition: gpu\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def planned(path: Path) -> RunConfig:
    return resolve("tiny_neox", str(path))


def test_two_numbers_are_enough(folder: Path) -> None:
    base, mine = resolve("tiny_neox", "p5").cluster, planned(folder / "mine.yaml").cluster
    assert (mine.name, mine.node_local, mine.directives) == ("mine", "/scratch", base.directives)
    changed = {"memory_gib": 139.8, "memory_gb_s": 4800.0}
    derived = {"source": mine.hardware.source, "assumed": mine.hardware.assumed}
    assert mine.hardware == base.hardware.model_copy(update=changed | derived)
    assert mine.hardware.source == f"memory_gib, memory_gb_s as given; {base.hardware.source}"
    assert set(mine.hardware.assumed) == {*base.hardware.assumed, "memory_efficiency"}
    # They are no longer the nodes that cost that.
    assert (mine.instance_type, mine.price) == (None, None)


def test_chains_and_origins(folder: Path) -> None:
    config = planned(folder / "other.yaml")
    cluster, origins = config.cluster, config.origins
    assert (cluster.name, cluster.env, cluster.health.efa_interfaces) == ("other", {}, 4)
    assert cluster.hardware.memory_gib == 139.8
    assert origins["cluster.health.efa_interfaces"] == "other.yaml:3"
    assert origins["cluster.hardware.memory_gib"] == "mine.yaml:2"
    assert origins["cluster.hardware.bf16_tflops"].startswith("p5.yaml:")
    assert not any(path.startswith("cluster.env") for path in origins)
    assert change(resolve("tiny_neox"), str(folder / "other.yaml"), ()).cluster == cluster
    (folder / "config.yaml").write_text(config.to_yaml())
    assert load(folder / "config.yaml").cluster == cluster
    (folder / "my nodes (new).yaml").write_text("extends: p5\n")
    assert planned(folder / "my nodes (new).yaml").cluster.name == "my-nodes-new-"


def test_what_a_profile_gives_itself_is_not_assumed(folder: Path) -> None:
    hardware = planned(folder / "kept.yaml").cluster.hardware
    assert hardware.network_efficiency == 0.8
    assert "network_efficiency" not in hardware.assumed
    assert "overlap" in hardware.assumed


def test_without_other_figures_they_are_the_same_nodes(folder: Path) -> None:
    base, partition = resolve("tiny_neox", "p5").cluster, planned(folder / "partition.yaml").cluster
    assert partition == base.model_copy(update={"name": "partition", "partition": "gpu"})


def test_what_is_refused(folder: Path) -> None:
    unknown = r"\(unknown\.yaml:2\): unknown cluster profile 'p55'; did you mean 'p5'"
    for name, message in (("unknown", unknown), ("undated", "cluster.price.date")):
        with pytest.raises(ConfigError, match=message):
            planned(folder / f"{name}.yaml")


def test_assumed_names_are_checked(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(folder / "wrong.yaml")
    (fault,) = caught.value.faults
    assert fault.startswith(
        "cluster.hardware.assumed: ['speed'] (wrong.yaml:2): names unknown fields"
    )


@pytest.mark.parametrize(
    "text", ["devices_per_node: 4", "instance_type: p5.4xlarge", "price: null", "device: cpu"]
)
def test_other_nodes_do_not_have_the_extended_profile_s_price(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"extends: p5\n{text}\n")
    cluster = resolve("tiny_neox", str(tmp_path / "mine.yaml")).cluster
    assert cluster.price is None
    others = {"instance_type: p5.4xlarge": "p5.4xlarge", "price: null": "p5.48xlarge"}
    assert cluster.instance_type == others.get(text)
    assert cluster.hardware is not None
    for links in ("overlap", "network_gb_s"):
        assert (links in cluster.hardware.assumed) == text.startswith("device")
