"""What makes the graphs of one run serve another, foretold without compiling anything."""

import os
import re
import shutil
from pathlib import Path

import pytest
from launch.graphs.conftest import pack

import slurmllm
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.artifact_records import GraphManifest, MicroBatchRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.graphs import archive as graph_cache
from slurmllm.launch.graphs import reuse
from slurmllm.launch.graphs.reuse import GRAPH_MODULES, graph_fingerprint, sources
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.backends.nxd.environment import versions


@pytest.fixture(autouse=True)
def _no_threads_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def fingerprint(
    *overrides: str,
    recipe: str = "tiny_neox",
    nodes: int = 2,
    cluster: str | None = None,
    local: bool = False,
    measured: int | None = None,
) -> str | None:
    config = resolve(recipe, cluster, overrides)
    return graph_fingerprint(config, make_mesh(config, nodes, measured), local, measured)


OTHER_GRAPHS = (
    *("model.hidden_size=384", "train.micro_batch=1", "train.precision=bf16_mixed"),
    *("train.compile=false", "train.activation_checkpointing=[core, mlp]"),
    *("parallel.tensor=2", "parallel.pipeline=2", "train.z_loss=1e-4"),
    *("cluster.cpus_per_node=7", "slurm.partition=other", "env.TORCHINDUCTOR_MAX_AUTOTUNE=1"),
)
SAME_GRAPHS = (
    *("train.steps=70", "train.seed=5", "optim.lr=1e-2", "checkpoint.keep=9"),
    *("slurm.time=9:00:00", "cluster.env.NCCL_DEBUG=INFO"),
)


@pytest.mark.parametrize("override", [*OTHER_GRAPHS, *SAME_GRAPHS])
def test_what_changes_native_graphs(override: str) -> None:
    assert (fingerprint(override) != fingerprint()) is (override in OTHER_GRAPHS)


def test_nodes_count_where_the_graphs_or_the_threads_hold_them() -> None:
    assert fingerprint(nodes=4) == fingerprint(nodes=2)
    if len(os.sched_getaffinity(0)) > 1:
        assert fingerprint(nodes=1, local=True) != fingerprint(nodes=2, local=True)
    trn1 = {"recipe": "neox_20b", "cluster": "trn1"}
    assert fingerprint(nodes=4, **trn1) != fingerprint(nodes=8, **trn1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        *(("optim.lr=1e-5", True), ("parallel.sequence=false", True)),
        *(("env.NEURON_CC_FLAGS=-O1", True), ("train.precision=fp32", True)),
        *(("env.FI_PROVIDER=tcp", False), ("train.seed=5", False)),
        *(("env.NEURON_RT_EXEC_TIMEOUT=7", False), ("train.z_loss=1e-4", True)),
        *(("optim.decay_start=9000", False), ("optim.decay=constant", False)),
        ("optim.step_count=from_1", False),
    ],
)
def test_what_changes_graphs_on_neuron_devices(override: str, changes: bool) -> None:
    base = fingerprint(recipe="neox_20b", cluster="trn1", nodes=4)
    other = fingerprint(override, recipe="neox_20b", cluster="trn1", nodes=4)
    assert (base != other) is changes


def test_the_processor_counts_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    trn1 = {"recipe": "neox_20b", "cluster": "trn1", "nodes": 4}
    shells = []
    for capability in ("avx2", "default"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        for local in (True, False):
            neuron = fingerprint(local=local, **trn1)  # type: ignore[arg-type]
            shells.append((fingerprint(local=local), neuron))
    (here, neuron_here), (slurm, neuron), (here_2, neuron_here_2), (slurm_2, neuron_2) = shells
    assert here != here_2, "with --local this machine is the node"
    assert slurm == slurm_2, "the nodes' are not known here"
    assert (neuron_here, neuron) == (neuron_here_2, neuron_2), "Neuron's serve any host"
    assert fingerprint("env.ATEN_CPU_CAPABILITY=avx2") != slurm, "of the recipe: on every node"


def test_versions_and_variables_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("tiny_neox")
    mesh = make_mesh(config, 2)
    base = graph_fingerprint(config, mesh, False)
    with monkeypatch.context() as shell:
        shell.setenv("OMP_NUM_THREADS", "3")  # sbatch takes it along
        assert graph_fingerprint(config, mesh, False) != base
    monkeypatch.setattr(load_environment(config.backend), "versions", lambda: {"torch": "9"})
    assert graph_fingerprint(config, mesh, False) != base


@pytest.mark.parametrize(
    ("changed", "native", "nxd"),
    [
        *(("train/model/decoder.py", True, True), ("plan/parameters.py", True, True)),
        *(
            ("core/config/families/llama.py", True, True),
            ("train/backends/nxd/model.py", False, True),
        ),
        *(("train/backends/native/precision.py", True, False), ("plan/prices.py", False, False)),
    ],
)
def test_slurmllm_s_own_sources(changed: str, native: bool, nxd: bool, tmp_path: Path) -> None:
    package = Path(slurmllm.__file__).parent
    edited = tmp_path / "edited"
    shutil.copytree(package, edited, ignore=shutil.ignore_patterns("__pycache__"))
    assert sources("native", edited) == sources("native")
    sources.cache_clear()
    (edited / changed).write_text((package / changed).read_text() + "\nX = 1\n")
    for backend, differs in (("native", native), ("nxd", nxd)):
        assert (sources(backend, edited) != sources(backend)) is differs


def test_the_model_s_code_uses_no_other_module_of_plan() -> None:
    package = Path(slurmllm.__file__).parent
    used = set()
    for folder in ("model", "backends/native", "backends/nxd"):
        for file in (package / "train" / folder).rglob("*.py"):
            used |= set(re.findall(r"slurmllm\.plan\.(\w+)", file.read_text()))
    assert used
    assert {f"plan/{name}.py" for name in used} <= set(GRAPH_MODULES)


def test_sources_and_packages_are_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    base = fingerprint(recipe="neox_20b", cluster="trn1", nodes=4)
    monkeypatch.setattr("slurmllm.launch.graphs.reuse.sources", lambda backend: backend)
    assert fingerprint(recipe="neox_20b", cluster="trn1", nodes=4) != base
    assert {"libneuronxla", "neuronx-cc"} <= versions().keys()


def test_an_unmeasured_micro_batch_has_no_fingerprint() -> None:
    auto = "train.micro_batch=auto"
    assert fingerprint(auto) is None
    assert fingerprint(auto, measured=2) == fingerprint(auto, measured=2, nodes=8)
    assert fingerprint(auto, measured=2) != fingerprint(auto, measured=4)


def run_with_graphs(root: Path, name: str, *overrides: str, measured: int | None = None) -> RunDir:
    """A run whose precompile stage has finished."""
    run, config = RunDir(root / name), resolve("tiny_neox", overrides=overrides)
    run.path.mkdir(parents=True)
    run.config.write_text(config.to_yaml())
    if measured is not None:
        fields = {"reason": "", "candidates": (), "limit_bytes": 1, "nodes": ("n1",)}
        fields |= {"micro_batch": measured, "device": "cpu", "workers": 1}
        MicroBatchRecord.model_validate(fields).save(run.micro_batch)
    mesh = make_mesh(config, 2, measured)
    made = graph_fingerprint(config, mesh, False, measured)
    pack(root / f".cache-{name}", run, name, versions={"torch": "2"}, fingerprint=made)
    return run


def find(root: Path, *overrides: str) -> str | None:
    config = resolve("tiny_neox", overrides=overrides)
    return next((run.name for run in reuse.find(config, 2, False, RunDir(root / "new"))), None)


def test_the_newest_run_that_serves_is_found(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    for age, name in ((300, "older"), (200, "newer"), (100, "other")):
        extra = ("train.precision=bf16",) if name == "other" else ()
        run = run_with_graphs(tmp_path, name, *extra)
        then = run.graphs_manifest.stat().st_mtime - age
        os.utime(run.graphs_manifest, (then, then))
    assert find(tmp_path) == "newer"
    assert find(tmp_path, "train.precision=bf16") == "other"
    assert find(tmp_path, "train.precision=bf16_sr") is None
    damaged = RunDir(tmp_path / "newer").graphs_manifest
    damaged.write_text(damaged.read_text()[:100])
    assert find(tmp_path) == "older"


def test_an_archive_is_shared_and_outlives_its_first_run(tmp_path: Path) -> None:
    source, run = run_with_graphs(tmp_path, "first"), RunDir(tmp_path / "second")
    run.path.mkdir()
    assert reuse.link_or_copy_graphs(source, run) is None
    assert run.graphs_archive().samefile(source.graphs_archive())
    manifest = GraphManifest.load(run.graphs_manifest)
    assert manifest.reused_from == "first"
    source.graphs_archive().unlink()
    assert graph_cache.install_archive(tmp_path / "node", run, manifest) == "shared"
    third = RunDir(tmp_path / "third")
    third.path.mkdir()
    assert reuse.link_or_copy_graphs(run, third) is None
    assert GraphManifest.load(third.graphs_manifest).reused_from == "first"


def test_a_damaged_archive_is_not_taken(tmp_path: Path) -> None:
    source, run = run_with_graphs(tmp_path, "first"), RunDir(tmp_path / "second")
    run.path.mkdir()
    data = bytearray(source.graphs_archive().read_bytes())
    data[600] ^= 1
    source.graphs_archive().write_bytes(data)
    assert "does not match its manifest" in str(reuse.link_or_copy_graphs(source, run))
    assert not run.graphs_manifest.exists()


def test_a_measured_micro_batch_comes_along(tmp_path: Path) -> None:
    auto = "train.micro_batch=auto"
    source = run_with_graphs(tmp_path, "first", auto, measured=2)
    assert find(tmp_path) is None, "not for a run that fixes it"
    assert find(tmp_path, auto) == "first"
    run = RunDir(tmp_path / "new")
    run.path.mkdir()
    assert reuse.link_or_copy_graphs(source, run) is None
    assert reuse.measured_micro_batch(run) == 2
    assert reuse.has_all_graphs(resolve("tiny_neox", overrides=[auto]), 2, False, run)
