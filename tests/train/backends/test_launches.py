"""The operations that a step launches outside its compiled graphs, on an accelerator.

It runs on CPUs: by a description of a device that has an accelerator's properties, and on meta.
Compiled functions are traced as ever; the count does not see what their graphs compute.
"""

import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import sample
from functorch.compile import make_boxed_func
from mesh_pool import Case, MeshPool, small_run
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.sizevars import SizeVarAllocator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slurmllm.core.config.profiles import available, shipped_dir
from slurmllm.core.config.resolve import resolve
from slurmllm.train.backends.native.device import KINDS, Accelerator
from slurmllm.train.backends.native.precision import update_
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.backends.native.unsharded import MixedAdamW, update_mixed_
from slurmllm.train.model.decoder import build_model
from train.backends.conftest import (
    LABELS,
    AcceleratorOfCpus,
    NewBackend,
    batch,
    micro_batches,
    save,
    train,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
COMPILED = ("train.micro_batch=4", "train.compile=true")
DEEP = ("model.family=gpt3", *COMPILED)
_ALLOCATIONS = ("empty", "new_empty", "_record_function", "_local_scalar_dense", "lift_fresh")


class Count(TorchDispatchMode):
    """Operations outside graphs; views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # or Dynamo would not use its graphs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().split("::")[1]
        if not func.is_view and name != "detach" and not name.startswith(_ALLOCATIONS):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def hidden(graph: fx.GraphModule, _: Any) -> Any:
    """Run a graph where no mode sees its operations."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return graph(*args)

    return make_boxed_func(run)


class TracedAccelerator(AcceleratorOfCpus):
    """Its compiler takes the graphs as they are."""

    @classmethod
    def compile(cls, function: Any, *, dynamic: bool = False, **_: Any) -> Any:
        compiler = aot_autograd(
            fw_compiler=hidden, bw_compiler=hidden, keep_inference_input_mutations=True
        )
        return torch.compile(function, backend=compiler, fullgraph=True, dynamic=dynamic)


def operations(backend: NativeBackend) -> Counter[str]:
    """Those of a step after the first two, which compile."""
    parts = micro_batches(batch(8 // backend.mesh.data), 8)
    for _ in range(3):
        with Count() as count:
            backend.forward_backward(parts, LABELS)
            backend.optimizer_step(1e-3)
            backend.param_norm()
    return count.names


def trace_graphs() -> None:
    KINDS["cpu"] = TracedAccelerator
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")


@pytest.mark.parametrize("precision", sample(2, ["bf16_mixed", "bf16_sr", "fp32"]))
def test_operations_do_not_grow_with_the_parameters(
    new_backend: NewBackend, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setitem(KINDS, "cpu", TracedAccelerator)
    settings = (f"train.precision={precision}", *DEEP, "train.micro_batch=8")
    counts = {}
    for layers in (2, 5):
        backend = new_backend(*settings, f"model.num_layers={layers}")
        counts[layers] = operations(backend)
    assert counts[2] == counts[5]
    assert counts[5].total() <= 100, counts[5]


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16_mixed", marks=pytest.mark.long), "bf16_sr"]
)
def test_operations_with_fsdp(pool: MeshPool, precision: str) -> None:
    """FSDP has some for each block, and casts each weight if it stores another format."""
    run = partial(small_run, "gpt3", 1, 1, 2, f"train.precision={precision}", *COMPILED)
    counts = {}
    for layers in (2, 4):
        config = run(f"model.num_layers={layers}")
        case = Case(config, last=0, prepare=trace_graphs, after=operations)
        counts[layers] = pool.run(case)[0].after
    of_blocks = counts[4] - counts[2]
    assert of_blocks.total() / 2 <= {"bf16_mixed": 30, "bf16_sr": 18}[precision], of_blocks


# Shapes


class Products(TorchDispatchMode):
    """The operands of matrix products whose rows don't begin at multiples of 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.odd = 0, set[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name() in ("aten::mm", "aten::addmm", "aten::mm.out", "aten::addmm_"):
            self.number += 1
            tensors = [v for v in (*args, *(kwargs or {}).values()) if isinstance(v, Tensor)]
            for tensor in tensors:
                steps = [n for n in tensor.stride() if n != 1] if tensor.ndim == 2 else []
                if any(n * tensor.element_size() % 16 for n in steps):
                    self.odd.add(f"{func.name()} {tuple(tensor.shape)} {tensor.stride()}")
        return func(*args, **(kwargs or {}))


def products(recipe: str, row_multiple: int) -> Products:
    """Those of a step of one layer in bf16, on meta."""
    model = resolve(recipe, "p5", ["backend=native"]).recipe.model
    with torch.device("meta"):
        decoder = build_model(model.model_copy(update={"num_layers": 1})).to(torch.bfloat16)
        tokens = torch.zeros(2, model.seq_len, dtype=torch.int64)
    decoder.output.row_multiple = row_multiple
    with Products() as seen:
        decoder(tokens, tokens).backward()
    return seen


@pytest.mark.parametrize("recipe", available(shipped_dir() / "configs" / "recipes"))
def test_rows_of_all_products_are_aligned(recipe: str) -> None:
    seen = products(recipe, Accelerator.row_multiple)
    assert seen.number >= 10
    assert not seen.odd


def test_the_check_of_products_finds_an_odd_vocabulary() -> None:
    assert products("gpt3_125m", 1).odd


SETTINGS = ("train.precision=bf16_mixed", "train.compile=true", "optim.grad_clip=0.5")


class EagerAccelerator(AcceleratorOfCpus):
    """Its compiler captures graphs and runs them operation by operation."""

    @classmethod
    def compile(cls, function: Any, *, dynamic: bool = False, **_: Any) -> Any:
        return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "cpu", EagerAccelerator)


def make(new_backend: NewBackend, size: int, *overrides: str) -> NativeBackend:
    return new_backend(*SETTINGS, f"train.micro_batch={size}", *overrides)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("size", [8, 2])  # gradients in bf16, and sums of four in fp32
def test_it_is_clipping_and_then_adamw(
    new_backend: NewBackend, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    curves, weights = [], []
    for kind in (MixedAdamW, torch.optim.AdamW):
        if kind is torch.optim.AdamW:
            monkeypatch.setattr(NativeBackend, "_has_mixed_adamw", lambda self: False)
        backend = make(new_backend, size)
        assert isinstance(backend.optimizer, kind)
        curves.append(train(backend, 1, size=size))
        weights.append([whole(p).clone() for p in backend.model.parameters()])
        curves[-1] += train(backend, 3, first=1, size=size)
    # From equal gradients: the update's operations have another order.
    for parameter, expected in zip(*weights, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
    assert curves[0][:2] == curves[1][:2]
    # Later some weights have the other neighbour in bf16, 0.4 % away.
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


@pytest.mark.usefixtures("accelerator")
def test_the_copies_are_of_the_stored_weights(new_backend: NewBackend, tmp_path: Path) -> None:
    backend = make(new_backend, 8)
    assert backend.weights is not None
    train(backend, 2, size=8)
    save(backend, tmp_path)
    whole_run = train(backend, 2, first=2, size=8)
    for stored, copy in backend.weights.copies.items():
        assert torch.equal(stored.to(torch.bfloat16), copy)
    # What is loaded replaces the copies too, of a run with steps behind it as of a new one.
    backend.load_shards(tmp_path)
    assert train(backend, 2, first=2, size=8) == whole_run
    backend = make(new_backend, 8, "train.seed=7")
    backend.load_shards(tmp_path)
    assert train(backend, 2, first=2, size=8) == whole_run


def update_by_elements(count: int) -> tuple[Any, ...]:
    return ([torch.rand(count) for _ in range(5)], torch.rand(7), torch.tensor(0.5))


def update_by_rows(columns: int) -> tuple[Any, ...]:
    tensors = [torch.rand(6, columns).bfloat16() for _ in range(4)]
    return (
        *tensors,
        *(torch.zeros(n, dtype=torch.int32) for n in ((6, 1), (columns,))),
        torch.rand(7),
    )


@pytest.mark.parametrize(
    ("update", "arguments"), [(update_mixed_, update_by_elements), (update_, update_by_rows)]
)
def test_an_update_s_kernel_knows_that_it_is_aligned(update: Any, arguments: Any) -> None:
    """Triton accesses memory by 16 bytes if Inductor knows that sizes are multiples of 16."""
    known: list[bool] = []

    def inspect(graph: fx.GraphModule, inputs: Any) -> Any:
        size = next(x.numel() for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
        assert isinstance(size, torch.SymInt)
        sizes = SizeVarAllocator(size.node.shape_env)
        known.append(sizes.statically_known_multiple_of(size.node.expr, 16))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend: Any = aot_autograd(fw_compiler=inspect)
    compiled: Any = torch.compile(update, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for length in (1600, 320, 1603, 4096, 37):
            compiled(*arguments(length))
    assert known == [True, False], "a graph for multiples, and one for the others"
