"""The profile that `init` writes for partitions of many sites."""

import re
from dataclasses import replace
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.layers import make_tree, plain
from slurmllm.core.config.profiles import extended
from slurmllm.core.config.resolve import resolve
from slurmllm.core.config.yaml_source import parse_yaml
from slurmllm.core.slurm.client import Association
from slurmllm.core.slurm.site import NodeKind
from slurmllm.launch.init import draft as survey_module
from slurmllm.launch.init.draft import (
    Draft,
    Machine,
    draft_profile,
    nearest_figures,
    shipped_values,
    survey,
)

MACHINE = Machine("login1", "", (), (), "/home/me/venv/bin/python", "nfs4", ())


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(survey_module, "_this_machine", lambda client: MACHINE)
    fake = FakeSlurm()
    assert fake.config is not None
    fake.config["ClusterName"] = "site"
    return fake


def draft(fake: FakeSlurm, **machine: Any) -> Draft:
    site = survey(fake)
    site = replace(site, machine=replace(site.machine, **machine))
    return draft_profile(site, site.partitions["main"])


def profile_of(draft: Draft) -> Cluster:
    """The profile with all that it extends."""
    values = parse_yaml(draft.text)
    base = make_tree(shipped_values(values.pop("extends")), {})
    profile = plain(extended(base, make_tree(values, {})))
    return Cluster.model_validate({**profile, "name": "draft"})


def kind(gpu_type: str, features: str = "", gpus: int = 8) -> NodeKind:
    return NodeKind(("n1", "n2"), 96, 2**20, gpus, gpu_type, tuple(filter(None, features.split())))


@pytest.mark.parametrize(
    ("gpu_type", "features", "profile", "confidence"),
    [
        ("h100", "", "h100_ib", "likely"),
        ("", "ib h200", "p5e", "likely"),
        ("h100", "p5.48xlarge efa", "p5", "exact"),
        ("a100", "p4d.24xlarge", "p4d", "exact"),
        ("nvidia_a100-sxm4-40gb", "", "p4d", "likely"),
        ("a100", "gpu_mem:80GB", "a100_ib", "likely"),
        ("nvidia_a100-pcie-40gb", "", "p4d", "guess"),
        ("a100_1g.10gb", "", "a100_ib", "guess"),
        ("", "", "a100_ib", "guess"),
    ],
)
def test_the_nearest_figures(gpu_type: str, features: str, profile: str, confidence: str) -> None:
    figures = nearest_figures(kind(gpu_type, features))
    assert (figures.profile, figures.confidence) == (profile, confidence)
    assert figures.changes.get("hardware", {}).get("rough", False) is (confidence == "guess")


def test_neuron_nodes_are_known_by_their_instance_type(site: FakeSlurm) -> None:
    site.features = {}
    site.unequal = {name: {"features": "static,trn1.32xlarge,efa"} for name in site.states}
    profile = profile_of(draft(site))
    assert (profile.device, profile.devices_per_node) == ("neuron", 32)
    assert profile.node_local == "/scratch"
    assert profile.price is not None
    assert profile.hardware == resolve("tiny_neox", "trn1").cluster.hardware


def test_gpus_of_another_site_have_no_efa_no_price_and_an_assumed_network(site: FakeSlurm) -> None:
    site.gres, site.cpus = "gpu:h200:4(S:0-1)", 64
    profile = profile_of(draft(site))
    assert (profile.instance_type, profile.price, profile.env) == (None, None, {})
    assert profile.health.efa_interfaces == 0
    assert (profile.device, profile.devices_per_node, profile.cpus_per_node) == ("cuda", 4, 64)
    assert profile.directives == ("--gpus-per-node=4",)
    hardware = profile.hardware
    assert hardware.memory_gib == 139.8
    assert {"network_gb_s", "network_efficiency", "overlap"} <= {*hardware.assumed}


def test_of_several_kinds_of_nodes_the_one_with_most_gpus(site: FakeSlurm) -> None:
    site.gres = "gpu:a100:8"
    site.unequal = {"n1": {"gres": "gpu:v100:4"}, "n2": {"gres": ""}}
    text = draft(site).text
    assert "devices_per_node: 8 " in text
    assert "- --gpus-per-node=a100:8" in text
    assert "leaves out 2 nodes of the partition" in text


def test_memory_is_requested_where_jobs_get_a_part_of_it(site: FakeSlurm) -> None:
    assert site.config is not None
    whole, part = {"DefMemPerNode": "UNLIMITED"}, {"DefMemPerCPU": "4000"}
    for limits, of_site, options in (
        ({}, {}, ()),
        (whole, {"DefMemPerCPU": "UNLIMITED"}, ()),
        (part, {"DefMemPerCPU": "UNLIMITED"}, ("--mem=0",)),
        (whole, part, ("--mem=0",)),
    ):
        site.limits = limits
        site.config |= of_site
        assert profile_of(draft(site)).directives == options


def test_an_account_and_a_qos_that_the_partition_takes(site: FakeSlurm) -> None:
    site.accounts = [
        Association("lab", True, "", ("normal", "long")),
        Association("gpu_lab", False, "main", ("normal",)),
        Association("other", False, "elsewhere", ("normal",)),
    ]
    text = draft(site).text
    assert "# - --account=lab " in text
    assert "yours: lab (default), gpu_lab\n" in text
    site.limits = {"AllowAccounts": "gpu_lab,x", "AllowQos": "long"}
    assert profile_of(draft(site)).directives == ("--account=gpu_lab", "--qos=long")


def test_what_the_machine_has_is_a_comment(site: FakeSlurm) -> None:
    text = draft(site, modules="Lmod 8.7", loaded=("gcc/12",), containers=("pyxis",)).text
    assert "Lmod 8.7; loaded now: gcc/12" in text
    assert "#   runtime: pyxis\n" in text
    assert site.config is not None
    site.config["TmpFS"] = "/local/scratch"
    assert profile_of(draft(site)).node_local == "/local/scratch"


def test_every_commented_field_is_valid_as_it_stands(site: FakeSlurm) -> None:
    site.gres, site.unequal = "gpu:h100:8", {"n1": {"features": "ib"}}
    site.accounts = [Association("lab", True, "", ("normal",))]
    whole = draft(site, modules="Lmod", containers=("apptainer",))
    first, second, *lines = whole.text.splitlines()
    text = "\n".join([first, second, *(re.sub(r"^( *)# ", r"\1", line) for line in lines)])
    profile = profile_of(replace(whole, text=text))
    assert profile.setup == ("module load cuda",)
    assert profile.container is not None
    assert "--account=lab" in profile.directives
