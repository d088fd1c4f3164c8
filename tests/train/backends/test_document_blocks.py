"""Attention between documents by flex_attention, trained on CPUs.

There torch has its arithmetic, forward and backward, but no kernels: compiled graphs are run
operator by operator, which torch's check of the device refuses. The kernels are in `test_cuda.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amounts import sample
from functorch.compile import make_boxed_func
from mesh_pool import Case, MeshPool, counted, deviation, micro_batches
from mesh_pool import small_run as small
from rounding import training_rounding
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import flex_attention

from slurmllm.plan import mesh as planned
from slurmllm.train.backends.native.device import KINDS, Device
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model import attention
from slurmllm.train.model.decoder import CausalCore, Mask
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
def test_same_training_as_with_the_dense_mask(
    pool: MeshPool, mesh: tuple[str, int, int, int]
) -> None:
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
    assert isinstance(backend, NativeBackend)
    (decoder,) = backend.chunks
    make_mask = decoder.document_blocks
    assert make_mask is not None

    def counting(positions: torch.Tensor) -> flex_attention.BlockMask:
        masks.append(mask := make_mask(positions))
        return mask

    decoder.document_blocks = counting
    for step in (1, 2):
        backend.forward_backward(micro_batches(backend, step), counted(backend.config, step))
    assert len(masks) == 2 * backend.mesh.accumulation == 8
    # Of masks, blocks, and two of the loss.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_evaluation(new_backend: NewBackend, flex: None) -> None:
    losses = []
    for compiled in ("true", "false"):
        backend = new_backend(DOCUMENTS, LONG, f"train.compile={compiled}")
        assert isinstance(backend, NativeBackend)
        assert (backend.chunks[0].document_blocks is not None) == (compiled == "true")
        parts = micro_batches(backend, 1)
        losses.append(float(backend.evaluate(parts, counted(backend.config, 1))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    "setting", ["train.compile=false", "model.num_heads=8", "model.seq_len=127", "data.mask=none"]
)
def test_where_the_mask_stays_dense(new_backend: NewBackend, flex: None, setting: str) -> None:
    backend = new_backend(DOCUMENTS, LONG, COMPILED, setting)
    assert isinstance(backend, NativeBackend)
    made = backend.chunks[0].document_blocks is not None
    assert made == (setting == "data.mask=none"), "where no documents are separated it is unused"


def test_the_planner_s_copies() -> None:
    flex = {name for name, kind in KINDS.items() if kind.document_attention == "flex"}
    assert flex == planned.FLEX_DEVICES
    assert planned.BLOCK == attention.BLOCK
