"""States of the graphs in Neuron's compile cache, and the commands that fill it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmllm.core.config.resolve import resolve
from slurmllm.train.backends.nxd import environment

MODULE = "neuron/neuronxcc-2.21.33363.0+82129205/MODULE_9993940051196728623+3cc9a3cb"
FILES = {
    "compiled": ("model.hlo_module.pb", "compile_flags.json", "model.neff", "model.done"),
    "failed": ("model.hlo_module.pb", "compile_flags.json", "model.log"),
    "extracted": ("model.hlo_module.pb", "compile_flags.json"),
    "locked": ("model.hlo_module.pb", "model.hlo_module.pb.lock"),
    "cut": ("model.hlo_module.pb", "model.neff"),
    "empty": ("model.hlo_module.pb", "model.done"),
    "retried": ("model.hlo_module.pb", "model.log", "model.neff", "model.done"),
}


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ("compiled", "compiled"),
        ("failed", "failed"),
        ("extracted", "missing"),
        ("locked", "missing"),
        ("cut", "missing"),
        ("empty", "missing"),
        ("retried", "compiled"),
    ],
)
def test_the_state_of_a_graph(tmp_path: Path, files: str, state: str) -> None:
    folder = tmp_path / MODULE
    folder.mkdir(parents=True)
    for name in FILES[files]:
        (folder / name).write_bytes(b"" if name == "model.done" else b"x")
    if files == "empty":
        (folder / "model.neff").write_bytes(b"")
    (graph,) = environment.graphs(tmp_path)
    assert (graph.name, graph.folder, graph.state) == (Path(MODULE).name, MODULE, state)
    assert graph.compiler == "neuronxcc-2.21.33363.0+82129205"
    assert (graph.log is not None) is (state == "failed")


def test_an_empty_cache(tmp_path: Path) -> None:
    assert environment.graphs(tmp_path) == []


def test_the_tool_runs_around_the_workers_and_then_compiles_all(tmp_path: Path) -> None:
    trn1 = resolve("neox_20b", "trn1")
    work = tmp_path / "work"
    collect, compile_all = environment.precompile_commands(trn1, ["python", "-m", "x"], work)
    assert collect[0].endswith("neuron_parallel_compile")
    assert collect[1:] == [
        "--command",
        "collect",
        "--parallel_compile_workdir",
        str(work),
        "python",
        "-m",
        "x",
    ]
    assert compile_all[1:] == ["--command", "compile", "--parallel_compile_workdir", str(work)]


def test_in_cpu_mode_without_the_tool_the_workers_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu = resolve("tiny_neox", "local", ["backend=nxd"])
    assert environment.precompile_commands(cpu, ["w"], tmp_path) == [["w"]]
    assert not environment.expects_graphs(cpu)


def test_versions_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no dpkg, no rpm, no modinfo
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(environment, "_LIBRARIES", tmp_path)
    assert environment.node_versions()["neuron-driver"] == "not installed"
    assert environment.node_versions()["neuron-runtime"] == "not installed"
    (tmp_path / "version").write_text("2.24.7.0\n")
    (tmp_path / "libnrt.so.2.28.23.0").write_text("")
    (tmp_path / "libnrt.so.1").symlink_to("libnrt.so.2.28.23.0")
    versions = environment.node_versions()
    assert (versions["neuron-driver"], versions["neuron-runtime"]) == ("2.24.7.0", "2.28.23.0")
    assert versions.items() >= environment.versions().items()
    dpkg_query = tmp_path / "dpkg-query"
    dpkg_query.write_text("#!/bin/sh\n[ $3 = aws-neuronx-collectives ] && printf 2.28.27.0\n")
    dpkg_query.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert environment.node_versions()["neuron-collectives"] == "2.28.27.0"
