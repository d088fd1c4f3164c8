"""What of data-parallel communication a step waits for: overlap, formats, rings, stragglers."""

import math

import pytest

from slurmllm.core.config.resolve import resolve
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.parameters import Product
from slurmllm.plan.search import known_hardware
from slurmllm.plan.step import OURS, StepTime, Trainer, gather_s, group, product_s, rate, step_time

FSDP = ("parallel.tensor=1", "parallel.pipeline=1", "parallel.zero=3", "train.micro_batch=2")
PLAIN = ("cluster.hardware.straggler_share=0", "train.precision=bf16_mixed")


def step(*overrides: str, nodes: int = 8, trainer: Trainer = OURS) -> StepTime:
    batch = f"train.global_batch={16 * nodes}"
    config = resolve("llama3_8b", "p5", [*FSDP, batch, *PLAIN, *overrides])
    return step_time(config, make_mesh(config, nodes), trainer)


def network(gb_s: float, *overrides: str, trainer: Trainer = OURS) -> float:
    return step(f"cluster.hardware.network_gb_s={gb_s}", *overrides, trainer=trainer).data


def test_a_slower_network_is_hidden_until_it_takes_longer_than_a_layer() -> None:
    """Twice the time on the network costs little as long as a layer computes for longer."""
    fast, half = network(400), network(200)
    step_s = step().total
    assert 0 < half - fast < 0.1 * step_s
    # Whatever the speed, some is exposed; where nothing more can be hidden, all that is added is.
    slow, slower = network(10), network(5)
    assert slower - slow == pytest.approx(2 * (slow - network(20)), rel=0.05)
    assert network(5, "cluster.hardware.overlap=0") - slower < step_s
    shares = [network(100, f"cluster.hardware.overlap={share}") for share in (0, 0.5, 1)]
    assert shares[0] > shares[1] > shares[2] > 0, "copies and the first gathering stay"


def test_sums_in_bf16_move_half_of_the_bytes() -> None:
    in_fp32 = network(5, "cluster.hardware.overlap=0")
    in_bf16 = network(5, "cluster.hardware.overlap=0", trainer=Trainer(reduced=2))
    # Two gatherings in bf16 and a reduction: 4 + 4 bytes a parameter, or 4 + 2.
    assert in_bf16 / in_fp32 == pytest.approx(6 / 8, rel=0.01)


@pytest.mark.parametrize("nodes", [2, 8])
def test_copies_sum_on_the_network_while_shards_use_the_links_of_a_node(nodes: int) -> None:
    def data(*overrides: str) -> float:
        slow = "cluster.hardware.network_gb_s=20"
        return step("parallel.shard_nodes=1", slow, *overrides, nodes=nodes).data

    assert data() < step("cluster.hardware.network_gb_s=20", nodes=nodes).data
    # Within a node, what is faster than the network in the last backward pass costs nothing.
    links = [data(f"cluster.hardware.node_link_gb_s={speed}") for speed in (450, 4500)]
    alone = [
        step(f"cluster.hardware.node_link_gb_s={speed}", nodes=1).data for speed in (450, 4500)
    ]
    assert links[0] - links[1] < alone[0] - alone[1]


def test_a_ring_takes_a_hop_for_each_other_worker() -> None:
    """NCCL's src/graph/tuning.cc: nodes - 1 of a gather's steps cross the network."""
    hardware = known_hardware(resolve("llama3_8b", "p5"))
    for nodes in (1, 2, 64):
        workers = group(1, 8 * nodes, 8)
        hops_s = (7 * nodes * 3.4 + (nodes - 1) * 14) * 1e-6
        sent_s = (8 * nodes - 1) / (8 * nodes) / rate(workers, hardware)
        assert gather_s(1, workers, hardware) == pytest.approx(hops_s + sent_s)


def test_larger_buckets_wait_less_often_for_a_ring() -> None:
    late = ("cluster.hardware.network_latency_us=1000", "cluster.hardware.overlap=0")
    each, all_at_once = (step(*late, trainer=Trainer(bucket=size)).data for size in (1, 10**12))
    few = step(*late, trainer=Trainer(bucket=10**9)).data
    hops_s = (56 * 3.4 + 7 * 1000) * 1e-6
    # 32 layers gather twice and reduce once; 8 billion parameters are 8.03 buckets.
    assert each - all_at_once == pytest.approx(3 * 31 * hops_s)
    assert few - all_at_once == pytest.approx(3 * 7.03 * hops_s, rel=0.01)


def test_owners_of_whole_tensors_broadcast_them_in_turn() -> None:
    zero1 = "parallel.zero=1", "cluster.hardware.overlap=0"

    def data(nodes: int, tensors: int) -> float:
        return step(*zero1, nodes=nodes, trainer=Trainer(tensors=tensors)).data

    # Gradients are summed by all instead of scattered, the same bytes more as weights in fp32.
    assert data(1, 300) > step(*zero1, nodes=1).data
    hops_s = [(7 * nodes * 3.4 + (nodes - 1) * 14) * 1e-6 for nodes in (8, 64)]
    assert data(8, 64) - data(8, 10) == pytest.approx(54 * hops_s[0])
    assert data(8, 1000) == data(8, 64), "no worker sends twice"
    assert data(64, 300) - data(64, 299) == pytest.approx(hops_s[1])


def test_work_and_memory_traffic_of_a_product_overlap_in_part() -> None:
    hardware = known_hardware(resolve("llama3_8b", "p5"))
    for k in (64, 1024, 8192):
        product = Product(8192, 8192, k)
        work = 2 * 8192**2 * k / (1e15 * hardware.matrix_efficiency)
        moved = 2 * (2 * 8192 * k + 8192**2) / (3350e9 * hardware.memory_efficiency)
        took = product_s(product, 1e15, 2, hardware)
        assert took == pytest.approx(math.hypot(work, moved))
        assert max(work, moved) < took < work + moved


def test_weights_that_fsdp_gathers_in_fp8_are_half_the_bytes() -> None:
    fp8 = ("train.precision=fp8_mixed", "cluster.hardware.overlap=0")
    rows, tensors = (step(*fp8, f"train.fp8_recipe={name}") for name in ("rowwise", "tensorwise"))
    in_bf16 = step("cluster.hardware.overlap=0")
    # Two gatherings and a reduction: 2 + 2 + 4 bytes a parameter, or 1 + 1 + 4.
    assert rows.data == pytest.approx(in_bf16.data)
    assert tensors.data / rows.data == pytest.approx(6 / 8, rel=0.04)
    # With scales of rows, each worker converts the whole weights anew, as a single one does.
    assert tensors.compute < rows.compute < in_bf16.compute


def test_stragglers_slow_each_doubling_of_the_nodes() -> None:
    none = step(nodes=8)
    some = step("cluster.hardware.straggler_share=0.01", nodes=8)
    assert some.total / none.total == pytest.approx(1 + 0.01 * math.log2(8))
    one = step("cluster.hardware.straggler_share=0.01", nodes=1)
    assert one.total == step(nodes=1).total


def test_blocks_that_are_not_compiled_are_slower() -> None:
    """fms-fsdp's README: Llama 2 7B takes 21 to 24 % longer without torch.compile."""
    sizes = {
        recipe: [
            step_time(config, make_mesh(config, 1)).compute
            for compiled in ("true", "false")
            for config in [resolve(recipe, "p5", [f"train.compile={compiled}", *FSDP])]
        ]
        for recipe in ("llama2_7b", "llama2_70b", "gpt3_13b")
    }
    slower = {recipe: after / before - 1 for recipe, (before, after) in sizes.items()}
    assert 0.15 < slower["llama2_7b"] < 0.4
    assert slower["llama2_70b"] < slower["llama2_7b"]
    assert slower["gpt3_13b"] == 0, "LayerNorm and GELU are kernels of their own"
