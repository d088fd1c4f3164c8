"""Graphs are used on the processor that they were compiled for, and on no other."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.graphs.conftest import compile_graphs, pack
from made_records import save_attempt

from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import EXIT_OK
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import INSTALLED_FILE, REUSED, wait_for_graphs
from slurmllm.launch.graphs import archive as graph_cache
from slurmllm.launch.graphs import merge
from slurmllm.launch.submit.prepare import render_run, write_run
from slurmllm.launch.supervise.launcher import Launcher
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.backends.native.environment import cpu_capability, cpu_fields, output, processor

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="capabilities of x86-64")
# ATen computes the capability once in a process, not before it is asked for: a child each.
_TORCH = """
import json, os, sys, torch
capabilities = {}
for value in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.environ.pop("ATEN_CPU_CAPABILITY", None)
        if value is not None:
            os.environ["ATEN_CPU_CAPABILITY"] = value
        os.write(writer, torch.backends.cpu.get_cpu_capability().encode())
        os._exit(0)
    os.close(writer)
    capabilities[json.dumps(value)] = os.read(reader, 100).decode()
    os.wait()
print(json.dumps(capabilities))
"""


@x86
def test_the_capability_is_torch_s() -> None:
    values = [None, "", "default", "avx2", "avx512", "AVX2", "vsx", "avx512_256"]
    command = [sys.executable, "-W", "ignore", "-c", _TORCH, json.dumps(values)]
    capabilities = json.loads(subprocess.check_output(command, text=True))
    flags = set(cpu_fields()["flags"])
    assert capabilities == {json.dumps(v): cpu_capability(flags, v) for v in values}
    assert len(set(capabilities.values())) > 1, "the variable has an effect"


@x86
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("sse2 avx", "DEFAULT"),
        ("avx avx2", "DEFAULT"),
        ("avx2 fma", "AVX2"),
        ("avx2 fma avx512f avx512vl", "AVX2"),
        ("avx2 fma avx512f avx512vl avx512bw avx512dq", "AVX512"),
    ],
)
def test_capabilities_of_other_processors(flags: str, name: str) -> None:
    assert cpu_capability(set(flags.split()), None) == name
    assert cpu_capability(set(flags.split()), "avx2") == "AVX2"


def test_gpus_are_known_by_name_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kinds = []
    for line in ("NVIDIA A100-SXM4-40GB, 8.0", "NVIDIA H100 80GB HBM3, 9.0"):
        output.cache_clear()
        smi.write_text(f"#!/bin/sh\necho '{line}'\necho '{line}'\n")
        smi.chmod(0o755)
        kinds.append(processor("cuda", {"ATEN_CPU_CAPABILITY": "avx2"}))
    output.cache_clear()
    assert kinds == [{"gpu": "NVIDIA A100-SXM4-40GB 8.0"}, {"gpu": "NVIDIA H100 80GB HBM3 9.0"}]
    assert load_environment("nxd").processor("neuron", os.environ) == {}


@pytest.mark.parametrize("script", [None, "exit 9", "exec sleep 30"])
def test_gpus_of_a_broken_driver_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    """Without nvidia-smi, or if it fails or hangs; the GPU's name is in Inductor's keys too."""
    output.cache_clear()
    monkeypatch.setattr("slurmllm.train.backends.environment._OUTPUT_S", 0.5)
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    if script is not None:
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
    assert processor("cuda", {}) == {"gpu": "unknown"}
    output.cache_clear()


def test_a_manifest_says_what_differs() -> None:
    manifest = GraphManifest.model_construct(
        versions={"torch": "2.9", "cpu_capability": "AVX512", "cpu_features": "amx_tile avx2 fma"},
        rejected="",
    )
    here = {"torch": "2.9", "cpu_capability": "AVX2", "cpu_features": "avx2 fma"}
    assert manifest.unusable(manifest.versions) is None
    assert manifest.unusable(here) == (
        "built in another environment (cpu_capability AVX512 in the archive, AVX2 on this node; "
        "cpu_features amx_tile in the archive, no others on this node)"
    )
    # An archive of a version that did not record the processor.
    old = GraphManifest.model_construct(versions={"torch": "2.9"}, rejected="")
    assert "cpu_capability none in the archive, AVX2 on this node" in str(old.unusable(here))


class MixedPartition:
    """The launchers of two nodes: `old`, a processor without AVX-512, and `new`."""

    def __init__(self, folder: Path) -> None:
        config = resolve("tiny_neox", "local", [f"cluster.node_local={folder / 'disk'}"])
        self.run = RunDir(folder / "runs" / "r")
        self.run.path.mkdir(parents=True)
        write_run(render_run(config, 2, self.run))
        save_attempt(self.run, nodes=("new", "old"), job_id="7", master_addr="127.0.0.1")
        self.installed: dict[str, bool] = {}  # node → whether its workers use the archive's graphs

    def launch(self, node: str, *graphs: str) -> Launcher:
        """Run a node's launcher with workers that compile `graphs` instead of training."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ATEN_CPU_CAPABILITY", {"new": "avx512", "old": "avx2"}[node])
            patch.setenv("SLURMLLM_NODE", node)
            patch.setenv("SLURM_NODEID", "0")
            launcher = Launcher(self.run, "train", 0)

            def train(install) -> bool:  # type: ignore[no-untyped-def]
                install()
                patch.setenv(INSTALLED_FILE, launcher.variables[INSTALLED_FILE])
                self.installed[node] = wait_for_graphs()
                inductor = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
                assert inductor == launcher.cache / "inductor"
                compile_graphs(launcher.cache, *graphs)
                launcher.save(pids={0: 1}, exit_codes={0: EXIT_OK})
                return False

            patch.setattr(launcher, "run_to_end", train)
            patch.setattr(launcher, "watch_signals", lambda: None)
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "SLURMLLM_CACHE"):
                patch.setenv(name, "")  # restored after the launcher has set it
            assert launcher.main() == 0
        return launcher


@pytest.fixture
def partition() -> Iterator[MixedPartition]:
    """It has an archive with graph `wide`, of the new processor."""
    with tempfile.TemporaryDirectory(prefix="slurmllm-test-") as folder:
        partition = MixedPartition(Path(folder))
        wide = processor("cpu", {"ATEN_CPU_CAPABILITY": "avx512"})
        versions = {**load_environment("native").versions(), **wide}
        pack(Path(folder) / "precompile", partition.run, "wide", versions=versions)
        yield partition


@x86
def test_a_partition_with_two_generations_of_processors(
    partition: MixedPartition, caplog: pytest.LogCaptureFixture
) -> None:
    new, old = partition.launch("new", "late"), partition.launch("old", "narrow")
    assert partition.installed == {"new": True, "old": False}
    assert new.node_record.cache == "shared"
    record = old.node_record
    reason = (
        "built in another environment (cpu_capability AVX512 in the archive, AVX2 on this node)"
    )
    assert (record.cache, record.cache_reason) == ("other_versions", reason)
    assert record.versions["cpu_capability"] == "AVX2"
    assert f"ignoring the graph archive: {reason}; this node compiles its own" in caplog.text
    # The nodes of this test share a disk: their caches are apart.
    assert new.cache != old.cache
    graphs = load_environment("native").graphs
    assert {g.name for g in graphs(new.cache)} == {"wide", "late"}
    assert {g.name for g in graphs(old.cache)} == {"narrow"}
    assert record.new_graphs == ("narrow",)
    assert merge.merge_new_graphs(partition.run) == ("late",)
    merged = GraphManifest.load(partition.run.graphs_manifest)
    assert {state.name for state in merged.states} == {"wide", "late"}
    assert merged.versions["cpu_capability"] == "AVX512"


@x86
def test_rejected_graphs_are_not_installed(partition: MixedPartition) -> None:
    merge.reject_graphs(partition.run, "train attempt 0 failed with it")
    record = partition.launch("new", "fresh").node_record
    assert partition.installed == {"new": False}
    assert (record.cache, record.cache_reason) == ("rejected", "train attempt 0 failed with it")


def test_workers_learn_of_reused_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSTALLED_FILE, raising=False)
    assert wait_for_graphs() is False
    installed = tmp_path / "installed"
    monkeypatch.setenv(INSTALLED_FILE, str(installed))
    for content in (REUSED, ""):
        installed.write_text(content)
        assert wait_for_graphs() is (content == REUSED)


def test_a_superseded_attempt_that_ends_later_keeps_no_worker_waiting(tmp_path: Path) -> None:
    with graph_cache.installing(tmp_path / "cache", "n1", 1) as installed:
        with graph_cache.installing(tmp_path / "cache", "n1", 0):
            installed.touch()
        assert installed.exists()
    assert not list(tmp_path.iterdir())


# Compiles and computes as the native backend does; prints whether the result is right.
_COMPILE = """
import sys, torch
from slurmllm.train.backends.native import compiling
compiling.tag_cache_keys()
f = torch.compile(lambda x: torch.softmax(x.exp() + 1, -1).sum(0) * x[0], fullgraph=True)
x = torch.arange(1200, dtype=torch.float32).reshape(24, 50) / 1200
close = torch.allclose(f(x), torch.softmax(x.exp() + 1, -1).sum(0) * x[0], atol=1e-5)
print(int(close), *compiling.cache_counts())
"""


@x86
@pytest.mark.long
def test_a_shared_cache_of_inductor_keeps_capabilities_apart(tmp_path: Path) -> None:
    """Without the tag the second process finds the first one's graph, and its result is wrong."""

    def compile_for(capability: str) -> tuple[int, ...]:
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        command, environment = [sys.executable, "-c", _COMPILE], {**os.environ, **cache}
        numbers = subprocess.check_output(command, env=environment, text=True)
        return tuple(map(int, numbers.split()))

    best = cpu_capability(set(cpu_fields()["flags"]), None).lower()
    other = "default" if best == "avx2" else "avx2"
    assert compile_for(best) == (1, 0, 1)
    assert compile_for(other) == (1, 0, 1)
    assert compile_for(best) == (1, 1, 0)


def test_tests_compile_in_a_folder_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = os.environ.get("SLURMLLM_TEST_CACHES") or tmp_path_factory.getbasetemp()
    assert Path(cache_dir()).parent == Path(folder)
