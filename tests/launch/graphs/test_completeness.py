"""Precompile, completeness and new graphs, on stand-ins for Neuron's tool and a worker.

`submit --local`, the nxd backend in CPU mode; the workers ask for graphs and do
nothing else (tests/nxd/standins).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from end_to_end.bench import Bench, processes_with
from made_records import save_attempt

from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.records import NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.rundir import Stage as StageName
from slurmllm.launch.submit.prepare import render_run, write_run
from slurmllm.train.control.rendezvous import free_port, new_secret

STANDINS = Path(__file__).resolve().parent.parent.parent / "nxd" / "standins"
sys.path.append(str(STANDINS))
import fake_runtime  # noqa: E402


class Stage:
    """A folder of runs whose compiler and workers are stand-ins."""

    def __init__(self, folder: Path, inputs: tuple[str, ...]) -> None:
        self.folder, self.inputs, self.runs = folder, inputs, folder / "runs"
        self.let(precompile=["a", "b"], train=["a", "b"])

    def let(self, **graphs: Any) -> None:
        """What the workers meet, and how they end."""
        (self.folder / "worker.json").write_text(json.dumps(graphs))

    def compiler(self, **wishes: Any) -> None:
        """What goes wrong while compiling."""
        (self.folder / "control.json").write_text(json.dumps(wishes))

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return self.start_bare(*arguments, "--runs-dir", str(self.runs), **variables)

    def start_bare(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PATH": f"{STANDINS}:{os.environ['PATH']}",
            "PYTHONPATH": str(STANDINS / "worker"),
            "STANDIN_WORKER": str(self.folder / "worker.json"),
            "STANDIN_CONTROL": str(self.folder / "control.json"),
            **variables,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "slurmllm", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def call(self, *arguments: str, code: int = 0, **variables: str) -> str:
        process = self.start(*arguments, **variables)
        output, _ = process.communicate(timeout=400)
        assert process.returncode == code, f"{process.returncode}: {output}"
        return output

    def submit_command(self, name: str, *more: str) -> tuple[str, ...]:
        return (
            *("submit", "tiny_neox", "--local", "--nodes=1", "--set=backend=nxd", f"--name={name}"),
            f"--set=cluster.node_local={self.folder}",
            "--set=cluster.health.enabled=false",
            *self.inputs,
            *more,
        )

    def submit(self, name: str, *more: str, code: int = 0) -> str:
        return self.call(*self.submit_command(name, *more), code=code)

    def status(self, name: str) -> dict[str, Any]:
        return Bench(self.runs).status(name)

    def manifest(self, name: str) -> GraphManifest:
        return GraphManifest.load(RunDir(self.runs / name).graphs_manifest)

    def attempt(self, name: str, number: int = 0, stage: StageName = "train") -> dict[str, Any]:
        record = RunDir(self.runs / name).attempt(stage, number).record
        return dict(json.loads(record.read_text()))

    def precompile_attempt(self, name: str) -> dict[str, Any]:
        return self.attempt(name, stage="precompile")

    def misses(self, name: str) -> dict[str, int]:
        return {n: first["cache_misses"] for n, first in self.status(name)["first_steps"].items()}


@pytest.fixture
def stage(tmp_path: Path, inputs: tuple[str, ...]) -> Stage:
    return Stage(tmp_path, inputs)


def module(name: str) -> str:
    """The hash of the flags is left out: the workers have some, this process has none."""
    return fake_runtime.module_name(name).partition("+")[0]


def names(manifest: GraphManifest, state: str) -> set[str]:
    return {s.name.partition("+")[0] for s in manifest.states if s.state == state}


def test_every_workers_graphs_are_compiled_before_the_training(stage: Stage) -> None:
    stage.let(precompile=["a", "b"], train=["a", "b"], rank_1=["c"])
    text = stage.submit("r", "--nodes=2")
    manifest = stage.manifest("r")
    assert manifest.complete
    # "c" is met by rank 1 alone, whose output the tool does not see.
    assert names(manifest, "compiled") == {module("a"), module("b"), module("c")}
    assert {s.compiler for s in manifest.states} == {f"neuronxcc-{fake_runtime.VERSION}"}
    assert stage.misses("r") == {"local0": 0, "local1": 0}
    assert "graph cache: 3 graphs" in text
    shown = stage.status("r")
    assert shown["versions"]["local1"]["neuron-driver"]
    node = json.loads(RunDir(stage.runs / "r").attempt("train", 0).node("local1").read_text())
    flags = node["environment"]["NEURON_CC_FLAGS"]
    assert flags in (stage.runs / "r" / "scripts" / "train.sbatch").read_text()
    assert node["environment"]["NXD_CPU_MODE"] == "1"
    assert shown["graphs"]["fingerprint"] == manifest.fingerprint != ""
    assert shown["warnings"] == []
    assert sorted(p.name for p in stage.folder.iterdir() if "work" in p.name) == ["worker.json"]


def test_a_failed_graph_stops_the_run_and_resume_completes_it(stage: Stage) -> None:
    """A graph that does not compile is named, whatever the tool returns."""
    stage.compiler(fail=["b"])
    text = stage.submit("r", code=70)
    before = stage.manifest("r")
    assert (before.complete, before.graphs) == (False, 1)
    (failed,) = (s for s in before.states if s.state == "failed")
    assert failed.name.startswith(module("b"))
    log = stage.runs / "r" / str(failed.log)
    assert log == RunDir(stage.runs / "r").graph_log(failed.name)
    assert "exceed the limit of 5000" in log.read_text()
    closed = stage.precompile_attempt("r")
    assert (closed["class"], closed["action"]) == ("compile_failure", "stop")
    for part in (failed.name, "exceed the limit of 5000", str(failed.log)):
        assert part in closed["evidence"][0]
    assert "train attempt" not in text
    shown = stage.status("r")
    assert (shown["state"], failed.name in shown["reason"]) == ("stopped", True)
    script = stage.runs / "r" / "scripts" / "train.sbatch"
    done = subprocess.run(
        ["bash", str(script)],
        env={**os.environ, "SLURMLLM_LOCAL_NODES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    for text in (failed.name, str(failed.log), "--set train.incomplete_graphs=compile"):
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    closed = stage.attempt("r")
    assert (closed["class"], closed["action"]) == ("compile_failure", "stop")
    assert any(failed.name in line for line in closed["evidence"])
    stage.compiler()
    text = stage.call("resume", "r")
    assert "Total graphs: 1\n" in text, "the other one is there already"
    manifest = stage.manifest("r")
    assert manifest.complete
    assert manifest.graphs == 2
    assert manifest.fingerprint == before.fingerprint
    assert not (stage.runs / "r" / "graphs" / "failed").exists()
    assert stage.status("r")["state"] == "done"
    assert stage.misses("r") == {"local0": 0}


def test_a_graph_that_hangs_the_compiler_is_named_after_a_stop(stage: Stage) -> None:
    stage.compiler(hang=["b"])
    process = stage.start(*stage.submit_command("r"))
    lock = "neuron/neuronxcc-*/MODULE_*/*.lock"
    deadline = time.monotonic() + 300
    while not list(stage.folder.glob(f"slurmllm-*/*/{lock}")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)  # as the time limit does: the supervisor gets a signal
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130, output
    closed = stage.precompile_attempt("r")
    assert closed["class"] == "compile_failure"
    assert "before the compiler was done" in closed["evidence"][0]
    assert module("b") in closed["evidence"][1]
    assert not processes_with(str(stage.folder))
    hung = names(stage.manifest("r"), "missing")
    assert module("b") in hung
    stage.compiler()
    text = stage.call("resume", "r")
    assert f"Total graphs: {len(hung)}\n" in text
    assert stage.manifest("r").complete


def test_incomplete_graphs_compile_starts_without_an_artifact(stage: Stage) -> None:
    stage.compiler(drop=["b"])
    text = stage.submit("r", "--set=train.incomplete_graphs=compile")
    closed = stage.precompile_attempt("r")
    assert (closed["class"], closed["action"]) == ("compile_failure", "finish")
    (missing,) = (s for s in stage.manifest("r").states if s.state != "compiled")
    assert (missing.state, missing.log) == ("missing", None)
    assert missing.name.startswith(module("b"))
    assert "left no artifact and no log" in closed["evidence"][0]
    assert "train attempt 0: done" in text
    # The control file still drops it: the worker has compiled it for itself only.
    assert stage.attempt("r")["new_graphs"] == []
    assert not stage.manifest("r").complete


def test_graphs_compiled_while_training_are_there_for_the_next_attempt(stage: Stage) -> None:
    stage.let(
        precompile=["a"], train=["a", "late"], die={"0": int(signal.SIGKILL)}, rank_1=["c"]
    )  # rank 1 ends by its launcher's hand, on another "node" than the killed one
    text = stage.submit("r", "--nodes=2")
    first, second = stage.attempt("r", 0), stage.attempt("r", 1)
    assert (first["class"], second["class"]) == ("node_failure", "done")
    assert [name.partition("+")[0] for name in first["new_graphs"]] == [module("late")]
    assert second["new_graphs"] == []
    assert "1 new graphs in the archive" in text
    folder = RunDir(stage.runs / "r").attempt("train", 1).worker(0).parent
    counts = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert [(c["cache_hits"], c["cache_misses"]) for c in counts] == [(2, 0), (3, 0)]
    shown = stage.status("r")
    assert shown["attempts"][0]["new_graphs"] == first["new_graphs"]
    states = {s["name"].partition("+")[0] for s in shown["graphs"]["states"]}
    assert states == {module("a"), module("c"), module("late")}


def test_another_run_takes_the_archive_and_skips_precompile(stage: Stage) -> None:
    stage.submit("first")
    text = stage.submit("second")
    assert "compiled by run first already; no precompile stage" in text
    assert "precompile attempt" not in text
    assert stage.misses("second") == {"local0": 0}
    assert stage.manifest("second").reused_from == "first"

    # Nodes with other versions say so, and compile.
    manifest = stage.manifest("first")
    wrong = {**manifest.versions, "neuronx-cc": "2.99"}
    manifest.model_copy(update={"versions": wrong}).save(
        RunDir(stage.runs / "first").graphs_manifest
    )
    shutil.rmtree(stage.runs / "second")
    text = stage.submit("second")
    assert "compiled by run first already" in text, "foretold, and wrong"
    assert (
        "built in another environment (neuronx-cc 2.99 in the archive, not installed on this"
        in text
    )
    assert sum(stage.misses("second").values()) >= 2
    record = RunDir(stage.runs / "second").attempt("train", 0).node("local0")
    assert json.loads(record.read_text())["cache"] == "other_versions"
    merged = stage.manifest("second")
    assert (merged.versions, merged.graphs) == ({**wrong, "neuronx-cc": "not installed"}, 2)


def test_without_the_tools_workers_the_precompile_stage_names_the_reason(stage: Stage) -> None:
    broken = stage.folder / "bin" / "neuron_parallel_compile"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no compiler license; exit 3\n")
    broken.chmod(0o755)
    text = stage.call(
        *stage.submit_command("r"), code=70, PATH=f"{broken.parent}:{os.environ['PATH']}"
    )
    closed = stage.precompile_attempt("r")
    assert (closed["class"], closed["action"]) == ("node_failure", "stop")
    assert "ended with exit code 3 before its workers did" in text


class Nodes:
    """Launchers of two nodes of a Slurm job, each with a disk of its own; Slurm is not needed."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.secret = stage, new_secret()
        overrides = [option.partition("=")[2] for option in stage.inputs]
        overrides += ["backend=nxd", f"cluster.node_local={stage.folder}"]
        config = resolve("tiny_neox", overrides=overrides)
        self.run = RunDir(stage.runs / "r")
        self.run.path.mkdir(parents=True)
        write_run(render_run(config, 2, self.run))

    def open(self, name: StageName) -> None:
        nodes = {"nodes": ("n0", "n1"), "master_addr": "127.0.0.1", "control_port": free_port()}
        save_attempt(self.run, stage=name, job_id="7", **nodes)

    def launch(self, name: StageName, node: int) -> subprocess.Popen[str]:
        # The private folder on the node's disk has the user's name: each node gets its own.
        return self.stage.start_bare(
            *("launch", str(self.run.path), "--stage", name, "--attempt", "0"),
            SLURMLLM_CACHE="/replaced",
            SLURM_NODEID=str(node),
            SLURMLLM_NODE=f"n{node}",
            LOGNAME=f"disk{node}",
            NEURON_COMPILE_CACHE_URL="/replaced",
            **self.secret,
        )

    def both(self, name: StageName) -> list[str]:
        started = [self.launch(name, node) for node in (1, 0)]
        return [process.communicate(timeout=400)[0] for process in started]

    def compiled(self, name: StageName, node: int) -> bool:
        """Whether a node has written down the graphs that it compiled."""
        path = self.run.attempt(name, 0).node(f"n{node}")
        return path.is_file() and bool(NodeRecord.load(path).graphs)

    def record(self, name: StageName, node: int) -> NodeRecord:
        return NodeRecord.load(self.run.attempt(name, 0).node(f"n{node}"))


def test_graphs_and_failures_of_all_nodes_come_into_one_manifest(stage: Stage) -> None:
    stage.let(precompile=["a", "b"], train=["a"], rank_1=["c", "bad"])
    stage.compiler(fail=["bad"])
    nodes = Nodes(stage)
    nodes.open("precompile")
    nodes.both("precompile")
    manifest = GraphManifest.load(nodes.run.graphs_manifest)
    assert names(manifest, "compiled") == {module("a"), module("b"), module("c")}
    (failed,) = (s for s in manifest.states if s.state == "failed")
    assert failed.name.startswith(module("bad"))
    assert "bad: instructions" in (nodes.run.path / str(failed.log)).read_text()
    assert not manifest.complete
    assert len(nodes.record("precompile", 1).graphs) == 3
    assert not list(nodes.run.graphs.glob("from_*"))


def test_a_node_that_dies_in_the_precompile_stage_is_not_waited_for(stage: Stage) -> None:
    stage.compiler(hang=["c"])
    stage.let(precompile=["a"], train=["a"], rank_1=["c"])
    nodes = Nodes(stage)
    nodes.open("precompile")
    second, first = nodes.launch("precompile", 1), nodes.launch("precompile", 0)
    deadline = time.monotonic() + 300
    hung = "slurmllm-disk1/*/neuron/*/*/*.lock"
    while not (list(stage.folder.glob(hung)) and nodes.compiled("precompile", 0)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second.kill()
    second.communicate(timeout=400)
    first.send_signal(signal.SIGTERM)  # as srun does when a node of the step is lost
    output, _ = first.communicate(timeout=400)
    manifest = GraphManifest.load(nodes.run.graphs_manifest)
    assert (manifest.missing_nodes, manifest.complete) == (("n1",), False), output
    assert names(manifest, "compiled") == {module("a")}
    deadline = time.monotonic() + 300
    while processes_with(str(stage.folder)):
        assert time.monotonic() < deadline, "somebody outlived the launcher"
        time.sleep(0.1)
