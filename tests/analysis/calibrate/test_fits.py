"""Figures from measurements: what made the measurements up comes out again."""

import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmllm.analysis.calibrate import worker
from slurmllm.analysis.calibrate.fits import hardware_of
from slurmllm.analysis.calibrate.measuring import Item, measure, scale_of
from slurmllm.analysis.calibrate.node import GPU_LIMIT_S, STEP_LAYERS, Sample, Task, step_config
from slurmllm.analysis.calibrate.worker import PARTS_S, _measurements
from slurmllm.core.config.cluster import Hardware
from slurmllm.core.errors import NodeError
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.parameters import Product
from slurmllm.plan.step import gather_s, group, product_s, step_time

TRUTH = Hardware(
    source="made up",
    bf16_tflops=400.0,
    fp32_tflops=80.0,
    memory_gib=80.0,
    reserved_gib=2.0,
    memory_gb_s=2000.0,
    node_link_gb_s=300.0,
    network_gb_s=50.0,
    matrix_efficiency=0.8,
    matrix_half=150.0,
    attention_efficiency=0.4,
    memory_efficiency=0.7,
    node_link_efficiency=0.6,
    network_efficiency=0.5,
    node_link_latency_us=10.0,
    network_latency_us=30.0,
    overlap=0.8,
    operator_us=40.0,
    step_overhead_s=0.02,
)
TASK = Task(
    nodes=2,
    workers=8,
    sharing=8,
    cpus=None,
    device="cuda",
    address="n1",
    port=1,
    precision="bf16",
    compiled=True,
    variables={},
)
GROUPS = {"node": group(1, 8, 8), "network": group(8, 2, 8)}


def made_up(hardware: Hardware) -> Iterator[Sample]:
    """What devices of these figures would measure."""
    for precision, width in (("bf16", 2), ("fp32", 4)):
        peak = getattr(hardware, f"{precision}_tflops") * 1e12
        for k in (256, 512, 1024, 2048, 4096, 8192):
            product = Product(8192, 4 * k, k)
            seconds = 3 * product_s(product, peak, width, hardware)
            yield Sample(kind="product", of=precision, sizes=(8192, 4 * k, k), value=seconds)
    peak = hardware.bf16_tflops * 1e12
    yield Sample(
        kind="attention",
        of="bf16",
        sizes=(10**12,),
        value=10**12 / peak / hardware.attention_efficiency,
    )
    bandwidth = hardware.memory_gb_s * 1e9
    yield Sample(kind="copy", sizes=(10**9,), value=1e9 / bandwidth)
    for of in ("block", "logits", "optimizer"):
        seconds = 1e9 / bandwidth / hardware.memory_efficiency
        yield Sample(kind="elementwise", of=of, sizes=(10**9,), value=seconds)
    yield from links(hardware)
    for layers in (2, 8):
        seconds = hardware.step_overhead_s + layers * 4 * 3 * hardware.operator_us * 1e-6
        yield Sample(kind="step", sizes=(layers, 4), value=seconds)
    yield Sample(kind="reserved", value=hardware.reserved_gib * 2**30)
    yield Sample(kind="memory", value=hardware.memory_gib * 2**30)


def gpu_steps(hardware: Hardware) -> Iterator[Sample]:
    for layers in STEP_LAYERS["cuda"]:
        config = step_config(TASK, layers)
        cluster = config.cluster.model_copy(update={"hardware": hardware})
        step = step_time(replace(config, cluster=cluster), make_mesh(config, 1))
        yield Sample(kind="gpu_step", sizes=(layers, 1), value=step.total + 0.003)


def links(hardware: Hardware) -> Iterator[Sample]:
    for where, members in GROUPS.items():
        for size in (8192, 16 << 20, 256 << 20):
            seconds, sizes = gather_s(size, members, hardware), (members.size, size)
            yield Sample(kind="all_reduce", of=where, sizes=sizes, value=2 * seconds)
        yield Sample(kind="all_gather", of=where, sizes=sizes, value=seconds)
        yield Sample(kind="reduce_scatter", of=where, sizes=sizes, value=seconds)


def figures(hardware: Hardware) -> dict[str, Any]:
    """The numbers."""
    result = hardware.model_dump(exclude={"source", "rough", "assumed"})
    return {name: value for name, value in result.items() if value is not None}


def test_known_peaks_are_kept_and_shares_of_them_found() -> None:
    hardware, notes = hardware_of(list(made_up(TRUTH)), TASK, TRUTH, "here")
    assert notes == ()
    assert hardware.source == "here"
    assert figures(hardware) == pytest.approx(figures(TRUTH), rel=0.001)


def test_steps_of_a_gpu_show_what_its_memory_reaches() -> None:
    """Whatever the head and the optimizer take besides, in steps that the device limits."""
    fast = TRUTH.model_copy(update={"operator_us": 2.0, "step_overhead_s": 0.001})
    samples = [s for s in made_up(fast) if s.kind != "elementwise"]
    for efficiency in (0.4, 0.7):
        truth = fast.model_copy(update={"memory_efficiency": efficiency})
        measured = [*samples, *gpu_steps(truth)]
        hardware = hardware_of(measured, TASK, TRUTH, "here")[0]
        assert hardware.memory_efficiency == pytest.approx(efficiency, rel=0.03)
        assert hardware.operator_us == pytest.approx(2.0, rel=0.01)
    with pytest.raises(NodeError, match="did not measure gpu_step"):
        hardware_of(measured[:-1], TASK, TRUTH, "here")


def test_without_known_peaks_what_is_reached_is_the_same() -> None:
    rough = TRUTH.model_copy(update={"rough": True, "bf16_tflops": 9999.0})
    hardware = hardware_of(list(made_up(TRUTH)), TASK, rough, "here")[0]
    assert hardware.matrix_efficiency == hardware.network_efficiency == 1.0
    for name in ("node_link", "network", "memory"):
        reached = [
            getattr(item, f"{name}_gb_s") * getattr(item, f"{name}_efficiency")
            for item in (hardware, TRUTH)
        ]
        assert reached[0] == pytest.approx(reached[1], rel=0.02)
    for name in ("bf16_tflops", "fp32_tflops"):
        assert getattr(hardware, name) == pytest.approx(0.8 * getattr(TRUTH, name), rel=0.02)


def test_one_lone_worker() -> None:
    alone = [s for s in made_up(TRUTH) if s.of not in GROUPS]
    hardware, notes = hardware_of(alone, TASK, None, "here")
    assert [note.split(":")[0] for note in notes] == ["node_link_…", "network_…"]
    assert hardware.network_gb_s == hardware.memory_gb_s
    hardware, notes = hardware_of(alone, TASK, TRUTH, "here")
    assert (hardware.network_gb_s, hardware.network_latency_us) == (50.0, 30.0)
    assert len(notes) == 2


def test_what_was_measured_is_no_longer_assumed() -> None:
    names = ("matrix_efficiency", "overlap", "network_efficiency", "node_link_efficiency")
    profile = TRUTH.model_copy(update={"assumed": names})
    everything = list(made_up(TRUTH))
    assert hardware_of(everything, TASK, profile, "here")[0].assumed == ("overlap",)
    node = [sample for sample in everything if sample.of != "network"]
    assumed = hardware_of(node, TASK, profile, "here")[0].assumed
    assert assumed == ("overlap", "network_efficiency")


def test_a_missing_measurement_is_named() -> None:
    for kind in ("attention", "copy", "product", "step", "reserved"):
        lacking = [sample for sample in made_up(TRUTH) if sample.kind != kind]
        with pytest.raises(NodeError, match="did not measure"):
            hardware_of(lacking, TASK, None, "here")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("call_s", "longest_s"), [(0.0, 2.5), (0.2, 6.5)], ids=["fast", "slow"])
def test_a_part_keeps_its_time(
    alone: None, capfd: pytest.CaptureFixture[str], call_s: float, longest_s: float
) -> None:
    """Six measurements of three rounds in half a second: or one round, each of two calls."""
    items = [Item("copy", str(i), (), lambda: time.sleep(call_s)) for i in range(6)]
    begun = time.monotonic()
    measure(items, torch.device("cpu"), 0.15, 3, limit_s=0.5)
    assert time.monotonic() - begun < longest_s
    samples = [Sample.parse(line) for line in capfd.readouterr().out.splitlines()]
    assert [sample.of for sample in samples if sample] == list("012345")
    assert all(sample.value >= call_s for sample in samples if sample)


def test_the_measurements_of_a_gpu_fit_into_their_time() -> None:
    scale = scale_of(TASK)
    counts = {}
    for name, items in _measurements(TASK, scale).items():
        if name != "collectives":  # their groups need the workers
            with torch.device("meta"):
                counts[name] = len(list(items()))
    # bf16 products of every size and the head's, and one in fp32 for its peak; nothing compiles.
    assert counts == {"matrix products": 14, "attention": 1, "memory": 1}
    for name, count in counts.items():
        assert count * scale.rounds * scale.budget_s <= PARTS_S[name]
    # What starts and compiles has the rest.
    assert sum(PARTS_S.values()) <= 0.75 * GPU_LIMIT_S < 45


def test_what_was_measured_is_released_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []

    def items() -> list[Item]:
        left.extend(tensor() is not None for tensor in made)
        tensor = torch.ones(4)
        made.append(weakref.ref(tensor))
        return [Item("copy", "", (1,), lambda: tensor.add_(1))]

    monkeypatch.setattr(worker, "_measurements", lambda *_: {"memory": items, "attention": items})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    changes = {"nodes": 1, "workers": 1, "device": "cpu", "quick": True, "products_only": True}
    worker.main(TASK.model_copy(update=changes).model_dump_json())
    assert left == [False]
