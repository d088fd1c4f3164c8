"""The environment of NxD runs, against what the published scripts set (docs/trn1.md)."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slurmllm.core.config.profiles import available
from slurmllm.core.config.resolve import RunConfig, recipes_dir, resolve
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.nxd import environment
from slurmllm.train.backends.nxd.environment import INSTANCES, graph_inputs, unsupported, variables

ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
ALL_REDUCE = "ALLREDUCE_BUCKET_CAP_MB"
ZERO = "ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB"


def values(recipe: str, *overrides: str, cluster: str = "trn1") -> dict[str, str]:
    config = resolve(recipe, cluster, overrides)
    return {name: variable.value for name, variable in variables(config).items()}


def flags(recipe: str, *overrides: str) -> set[str]:
    return set(shlex.split(values(recipe, *overrides)["NEURON_CC_FLAGS"]))


# In flight, seconds, malloc arenas, rounding, bucket of the all-reduce, bucket of ZeRO-1: from
# neox_20b.sh, train_setup.sh, HLAT's 7b/ and 70b/, and run_llama2_70B_tp_pp.sh.
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("neox_20b", ("5", "4000", "128", "1", "1024", None)),
        ("neox_20b_finetune", ("5", "4000", "128", "1", "1024", None)),
        ("pythia_6.9b", ("5", "4000", "128", "1", "1024", None)),
        ("llama2_7b", ("3", "4000", "64", "1", "512", None)),
        ("llama2_70b", ("7", "4000", "128", "0", None, "65")),
    ],
)
def test_by_recipe(recipe: str, expected: tuple[str | None, ...]) -> None:
    runtime = ("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "NEURON_RT_EXEC_TIMEOUT")
    names = (*runtime, "MALLOC_ARENA_MAX", ROUNDING, ALL_REDUCE, ZERO)
    by_name = values(recipe)
    assert tuple(by_name.get(name) for name in names) == expected


def test_by_precision() -> None:
    accumulation = "--enable-mixed-precision-accumulation"
    zero = "parallel.zero=1"
    for precision, rounding, bucket in (
        ("bf16_sr", "1", "65"),
        ("bf16", "0", "65"),
        ("bf16_mixed", "0", "65"),
        ("fp32", "0", "130"),
    ):
        by_name = values("neox_20b", zero, f"train.precision={precision}")
        assert (by_name[ROUNDING], by_name[ZERO]) == (rounding, bucket), precision
        asked = flags("neox_20b", f"train.precision={precision}")
        assert (accumulation in asked) == (precision != "fp32")
        assert "--auto-cast=none" in asked
        assert "--retry_failed_compilation" not in asked


@pytest.mark.parametrize("profile", ["trn1", "trn1n"])
def test_every_recipe_has_sources_and_nothing_that_is_no_longer_read(profile: str) -> None:
    dead = {"XLA_USE_BF16", "XLA_DOWNCAST_BF16", "BUCKET_CAP_MB"}
    dead |= {"TF_NUM_INTEROP_THREADS", "XLA_IO_THREAD_POOL_SIZE"}
    for recipe in available(recipes_dir()):
        values = variables(resolve(recipe, profile, ["backend=nxd"]))
        assert not dead & values.keys(), recipe
        assert all(variable.source for variable in values.values()), recipe
        assert (ALL_REDUCE in values) != (ZERO in values), recipe


def test_neurons_profiler() -> None:
    assert not any(name.startswith("NEURON_RT_INSPECT") for name in values("neox_20b"))
    config = resolve("neox_20b", "trn1", ["profile.steps=[10, 12]"])
    by_name = variables(config, Path("/runs/r/profiles/neuron"))
    inspect = {n: v.value for n, v in by_name.items() if n.startswith("NEURON_RT_INSPECT")}
    assert inspect == {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_DEVICE_PROFILE": "1",
        "NEURON_RT_INSPECT_OUTPUT_DIR": "/runs/r/profiles/neuron",
    }
    mesh = make_mesh(config, 4)
    plain = graph_inputs(resolve("neox_20b", "trn1"), mesh, None)
    assert graph_inputs(config, mesh, None) == plain, "the graphs stay valid"
    on_cpu = values("tiny_neox", "backend=nxd", "profile.steps=[1, 1]", cluster="local")
    assert "NEURON_RT_INSPECT_ENABLE" not in on_cpu


def test_by_node_type() -> None:
    efa = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    for profile in ("trn1", "trn1n"):
        assert efa.items() <= values("neox_20b", cluster=profile).items()
        assert resolve("neox_20b", profile).cluster.instance_type in INSTANCES
    small = ("cluster.instance_type=trn1.2xlarge", "cluster.devices_per_node=2")
    assert not efa.keys() & values("neox_20b", *small).keys()
    on_cpu = values("tiny_neox", "backend=nxd", cluster="local")
    assert not efa.keys() & on_cpu.keys()
    assert (on_cpu["NXD_CPU_MODE"], on_cpu["PJRT_DEVICE"]) == ("1", "CPU")


def faults(*overrides: str, cluster: str = "trn1") -> list[str]:
    config: RunConfig = resolve("neox_20b", cluster, overrides)
    return unsupported(config)


def test_profiles_that_do_not_fit_their_nodes() -> None:
    assert faults() == []
    assert faults(cluster="trn1n") == []
    assert faults("cluster.instance_type=null") == []
    (fault,) = faults("cluster.instance_type=trn2.48xlarge")
    assert "trn1.2xlarge, trn1.32xlarge, trn1n.32xlarge" in fault
    (fault,) = faults("cluster.devices_per_node=64")
    assert fault.endswith("set 32")


def test_one_norm_over_the_heads_of_several_workers() -> None:
    shared = "parallel={tensor: 8, auto: false}"
    (fault,) = unsupported(resolve("olmo3_7b", "trn1", [shared]))
    assert fault.startswith("parallel.tensor: 8: queries and keys of model.family olmo3 are normed")
    assert fault.endswith("--set parallel.tensor=1, or backend=native")
    for name, tensor in (("olmo3_7b", 1), ("gemma3_1b", 4), ("smollm3_3b", 8), ("qwen3_8b", 8)):
        parallel = f"parallel={{tensor: {tensor}, auto: false}}"
        assert unsupported(resolve(name, "trn1", [parallel])) == []


def test_torch_xla_gives_each_worker_its_core() -> None:
    """The variables make torch-xla set up a worker as it does under torchrun."""
    pytest.importorskip("torch_xla")
    script = (
        "import json, os\n"
        "from torch_xla._internal import neuron\n"
        "neuron.configure_pjrt_environment()\n"
        "neuron.initialize_env(5, 32)\n"
        "print(json.dumps(dict(os.environ)))\n"
    )
    worker = {"RANK": "37", "LOCAL_RANK": "5", "WORLD_SIZE": "128", "LOCAL_WORLD_SIZE": "32"}
    environment = {**os.environ, **values("neox_20b"), **worker, "MASTER_ADDR": "10.0.0.7"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["NEURON_PJRT_PROCESS_INDEX"] == "37"
    assert seen["NEURON_PJRT_WORLD_SIZE"] == "128"
    assert seen["NEURON_RT_VISIBLE_CORES"] == "5"
    assert seen["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.7:62182"


MODULE = "neuron/neuronxcc-2.21.33363.0+82129205/MODULE_9993940051196728623+3cc9a3cb"


@pytest.mark.parametrize(
    ("files", "state"),
    [
        (("compile_flags.json", "model.neff", "model.done"), "compiled"),
        (("compile_flags.json", "model.log"), "failed"),
        (("compile_flags.json",), "missing"),
        (("model.hlo_module.pb.lock",), "missing"),
        (("model.neff",), "missing"),
        (("model.done", "empty model.neff"), "missing"),
        (("model.log", "model.neff", "model.done"), "compiled"),
    ],
    ids=["compiled", "failed", "extracted", "locked", "cut", "empty", "retried"],
)
def test_the_state_of_a_graph(tmp_path: Path, files: tuple[str, ...], state: str) -> None:
    assert environment.graphs(tmp_path) == []
    folder = tmp_path / MODULE
    folder.mkdir(parents=True)
    for name in ("model.hlo_module.pb", *files):
        is_empty = name == "model.done" or name.startswith("empty ")
        (folder / name.removeprefix("empty ")).write_bytes(b"" if is_empty else b"x")
    (graph,) = environment.graphs(tmp_path)
    assert (graph.name, graph.folder, graph.state) == (Path(MODULE).name, MODULE, state)
    assert graph.compiler == "neuronxcc-2.21.33363.0+82129205"
    assert (graph.log is not None) is (state == "failed")


def test_the_tool_runs_around_the_workers_and_then_compiles_all(tmp_path: Path) -> None:
    trn1 = resolve("neox_20b", "trn1")
    work = tmp_path / "work"
    collect, compile_all = environment.precompile_commands(trn1, ["python", "-m", "x"], work)
    assert collect[0].endswith("neuron_parallel_compile")
    folder = ["--parallel_compile_workdir", str(work)]
    assert collect[1:] == ["--command", "collect", *folder, "python", "-m", "x"]
    assert compile_all[1:] == ["--command", "compile", *folder]


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
