"""Attention between documents by flex_attention, trained on CPUs.

There torch has its arithmetic, forward and backward, but no kernels: compiled graphs are run
operator by operator, which torch's check of the device refuses. The kernels are in `test_cuda.py`.
"""

import math
from typing import Any

import pytest
import torch
from amounts import sample
from functorch.compile import make_boxed_func
from mesh_pool import Case, MeshPool, counted, deviation, micro_batches
from mesh_pool import small_run as small
from rounding import training_rounding
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import flex_attention

from slurmllm.plan import mesh as planned
from slurmllm.plan.memory import memory_moments
from slurmllm.train.backends.native.device import KINDS, Device
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model import attention
from slurmllm.train.model.decoder import CausalCore, Mask
from slurmllm.train.model.init import local_part
from train.backends.conftest import NewBackend

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
DOCUMENTS, LONG = "data.mask=document", "model.seq_len=160"
COMPILED, FEW = "train.compile=true", "train.micro_batch=4"
SELECTIVE = "train.activation_checkpointing=selective"


def run_as_is(graph: fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(graph)


class FlexOnCpus(Device):
    """CPUs with flex_attention, whose compiler takes the graphs as they are."""

    document_attention = "flex"

    @classmethod
    def compile(cls, function: Any, *, dynamic: bool = False, **options: Any) -> Any:
        compiler = aot_autograd(
            fw_compiler=run_as_is,
            bw_compiler=run_as_is,
            partition_fn=options.get("custom_partitioner_fn", min_cut_rematerialization_partition),
            keep_inference_input_mutations=True,
        )
        return torch.compile(function, backend=compiler, fullgraph=True, dynamic=dynamic)


def use_flex() -> None:
    KINDS["cpu"] = FlexOnCpus
    flex_attention._validate_device = lambda *_: None  # type: ignore[assignment]


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "cpu", FlexOnCpus)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(
            ("llama3", 2, 1, 2, FEW, "parallel.sequence=true", SELECTIVE, "parallel.zero=3"),
            marks=pytest.mark.long,
        ),
        ("qwen3", 1, 2, 1, "parallel.virtual_pipeline=2"),
        pytest.param(
            ("qwen3", 2, 2, 1, FEW, "train.activation_checkpointing=full"), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_the_dense_mask_trains_the_same(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    config = small(*mesh, DOCUMENTS, LONG, COMPILED)
    expected = pool.run(Case(small(mesh[0], 1, 1, 1, DOCUMENTS, LONG), last=2))
    outcomes = pool.run(Case(config, last=2, prepare=use_flex))
    targets = min(counted(config, step) for step in (1, 2))
    assert max(deviation(outcomes, expected)) < training_rounding(config, 2, targets=targets)


@pytest.mark.parametrize("recomputed", sample(1, ["selective", "none", "full"]))
def test_one_mask_a_micro_batch_and_one_graph_for_all_blocks(
    new_backend: NewBackend, flex: None, monkeypatch: pytest.MonkeyPatch, recomputed: str
) -> None:
    masks: list[Mask] = []
    forward = CausalCore.forward

    def watched(self: CausalCore, *inputs: Any) -> Any:
        assert isinstance(inputs[4], flex_attention.BlockMask)
        return forward(self, *inputs)

    monkeypatch.setattr(CausalCore, "forward", watched)  # traced once for each graph
    torch._dynamo.utils.counters.clear()
    backend = new_backend(
        *(DOCUMENTS, LONG, COMPILED, "model.num_layers=3"),
        f"train.activation_checkpointing={recomputed}",
    )
    (decoder,) = backend.chunks
    make_mask = decoder.document_blocks
    assert make_mask is not None

    def counting(positions: torch.Tensor, window: Tensor | None) -> flex_attention.BlockMask:
        masks.append(mask := make_mask(positions, window))
        return mask

    decoder.document_blocks = counting
    for step in (1, 2):
        backend.forward_backward(micro_batches(backend, step), counted(backend.config, step))
    assert len(masks) == 2 * backend.mesh.accumulation == 8
    # Of masks, blocks, and two of the loss.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_one_graph_for_each_kind_of_layer(new_backend: NewBackend, flex: None) -> None:
    torch._dynamo.utils.counters.clear()
    kinds = "[{}, {window: 150, rope: none}, {window: 150}]"
    family = ("model.family=smollm3", "model.rotary_pct=1.0", "model.num_layers=6")
    backend = new_backend(LONG, COMPILED, *family, f"model.attention_pattern={kinds}")
    backend.forward_backward(micro_batches(backend, 1), counted(backend.config, 1))
    # Of the mask, of three kinds of blocks, and two of the loss.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 6


def test_evaluation(new_backend: NewBackend, flex: None) -> None:
    losses = []
    for compiled in ("true", "false"):
        backend = new_backend(DOCUMENTS, LONG, f"train.compile={compiled}")
        assert (backend.chunks[0].document_blocks is not None) == (compiled == "true")
        parts = micro_batches(backend, 1)
        losses.append(float(backend.evaluate(parts, counted(backend.config, 1))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    "setting", ["train.compile=false", "model.num_heads=8", "model.seq_len=127", "data.mask=none"]
)
def test_where_the_mask_stays_dense(new_backend: NewBackend, flex: None, setting: str) -> None:
    backend = new_backend(DOCUMENTS, LONG, COMPILED, setting)
    made = backend.chunks[0].document_blocks is not None
    assert made == (setting == "data.mask=none"), "where no documents are separated it is unused"


def test_the_planner_s_copies() -> None:
    flex = {name for name, kind in KINDS.items() if kind.document_attention == "flex"}
    assert flex == planned.FLEX_DEVICES
    assert planned.BLOCK == attention.BLOCK


def stored(backend: NativeBackend) -> dict[str, int]:
    """Bytes of weights, of their gradients and of the optimizer's moments."""
    parameters = list(backend.model.parameters())
    moments = [
        value
        for state in backend.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    return {
        "weights": sum(local_part(p).untyped_storage().nbytes() for p in parameters),
        "optimizer": sum(local_part(m).numel() * m.element_size() for m in moments),
    }


@pytest.mark.parametrize(
    "mesh",
    sample(
        2,
        [
            ("neox", 1, 1, 3, "train.global_batch=6", "train.precision=bf16_sr"),
            ("llama", 2, 2, 1, "train.precision=bf16_mixed", "parallel.virtual_pipeline=2"),
            ("llama", 1, 1, 4, "cluster.devices_per_node=2", "parallel.shard_nodes=1"),
            ("neox", 2, 1, 2, "train.micro_batch=4"),
            ("gpt3", 1, 2, 2, "train.precision=bf16_mixed"),
        ],
    ),
    ids=str,
)
def test_at_rest(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    config = small(*mesh)
    nodes = math.prod(mesh[1:4]) // config.cluster.devices_per_node
    case = Case(config, nodes, last=1, after=stored)
    for rank, outcome in enumerate(pool.run(case)):
        resting, _, _ = memory_moments(case.config, case.mesh, rank)
        assert outcome.after == {name: resting[name] for name in ("weights", "optimizer")}


def kept(backend: NativeBackend) -> int:
    """Bytes of all tensors that a forward pass keeps, parameters included."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local_part(tensor).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    (model,) = backend.chunks
    with backend.whole_weights():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*backend._to_device(micro_batches(backend, 1)[:1]))
        loss.backward()
    return sum(sizes.values())


def in_passes(case: Case, part: str) -> int:
    """Bytes of a part of the memory within the passes."""
    return memory_moments(case.config, case.mesh, 0)[1][part]


def predicted_drop(case: Case, without: Case) -> int:
    return in_passes(without, "activations") - in_passes(case, "activations")


@pytest.mark.parametrize("family", sample(1, ["llama", "neox"]))
def test_each_part_recomputed_saves_what_is_predicted(pool: MeshPool, family: str) -> None:
    def case(setting: str) -> Case:
        wide = ("model.seq_len=128", "train.micro_batch=8", "train.global_batch=8")
        recompute = f"train.activation_checkpointing={setting}"
        return Case(small(family, 1, 1, 1, *wide, recompute), last=0, after=kept)

    whole = case("none")
    (before,) = pool.run(whole)
    for setting in ("selective", "[mlp]", "[norm]", "[core, mlp]", "[core, mlp, norm]", "full"):
        (outcomes,) = pool.run(case(setting))
        predicted = predicted_drop(case(setting), whole)
        tolerance = 0.05 * in_passes(whole, "activations")
        assert before.after - outcomes.after == pytest.approx(predicted, abs=tolerance), setting


@pytest.mark.parametrize("family", sample(1, ["neox", "llama"]))
def test_the_mask_between_documents_is_kept_once(pool: MeshPool, family: str) -> None:
    def case(mask: str) -> Case:
        wide = ("model.seq_len=128", "train.micro_batch=8", "train.global_batch=8")
        return Case(small(family, 1, 1, 1, *wide, f"data.mask={mask}"), last=0, after=kept)

    masked = case("document")
    (before,), (outcomes,) = pool.run(case("none")), pool.run(masked)
    predicted = in_passes(masked, "masks")
    assert outcomes.after - before.after == pytest.approx(predicted, rel=0.1)


@pytest.mark.long
def test_compiled_tensor_parallel_parts(pool: MeshPool) -> None:
    """The same bits with less memory, sequence parallelism included."""

    def case(setting: str) -> Case:
        more = ("parallel.sequence=true", "train.micro_batch=4", "train.compile=true")
        recompute = f"train.activation_checkpointing={setting}"
        return Case(small("llama", 2, 1, 1, *more, recompute), last=3, after=kept)

    whole, parts = case("none"), case("[core, mlp]")
    before, outcomes = pool.run(whole), pool.run(parts)
    assert [outcome.rows for outcome in outcomes] == [outcome.rows for outcome in before]
    for more, less in zip(before, outcomes, strict=True):
        assert more.after - less.after >= predicted_drop(parts, whole) > 0
