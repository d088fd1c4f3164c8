import operator
from collections import Counter
from pathlib import Path

import pytest
import torch
from amounts import sample
from rounding import rounding_bound
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from slurmllm.train.backends.native.compiling import slow_bf16
from slurmllm.train.backends.native.graph_passes import GraphPass, widen_products

pytestmark = pytest.mark.numerics

MM = torch.ops.aten.mm.default
ADDMM = torch.ops.aten.addmm.default
CONVERT = torch.ops.prims.convert_element_type.default


def two_branches(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """A parallel residual: both biases have the same gradient."""
    return x + F.linear(x, w1, b1) + F.linear(x, w2, b2)


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16).requires_grad_()


def traced(function: object, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)  # type: ignore[arg-type]


def targets(module: fx.GraphModule) -> Counter[object]:
    return Counter(node.target for node in module.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("vendor", "flags", "slow"),
    [
        ("GenuineIntel", "avx512f avx512_bf16", True),
        ("GenuineIntel", "avx2", True),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_tile", False),
        ("AuthenticAMD", "avx512f avx512_bf16", False),
        ("AuthenticAMD", "avx2", True),
    ],
)
def test_processors(
    vendor: str, flags: str, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    core = f"vendor_id\t: {vendor}\nmodel name\t: a processor\nflags\t\t: fpu {flags}\n\n"
    cpuinfo.write_text(core * 2)
    assert slow_bf16(cpuinfo) is slow
    assert slow_bf16(tmp_path / "missing") is False


def test_wide_products_round_once() -> None:
    torch.manual_seed(0)
    inputs = bf16(24, 64), bf16(32, 64), bf16(32)
    module = traced(lambda x, w, b: F.linear(x, w, b), *inputs)
    widen_products(module.graph)
    module.recompile()
    x, w, b = (tensor.detach().float() for tensor in inputs)
    exact = F.linear(x, w, b)
    # Half of bf16's spacing, but for the order of the sum: rounding twice would be off by more.
    spacing = torch.exp2(exact.abs().log2().floor() - 7)
    allowed = spacing / 2 + rounding_bound(65) * exact.abs().max()
    assert ((module(*inputs).float() - exact).abs() <= allowed).all()
    assert ADDMM not in targets(module)
    assert targets(module)[MM] == 1


@pytest.mark.parametrize("masked", [False, True])
def test_wide_attention(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (bf16(2, 3, 16, 8) for _ in range(3))

    def gradient(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        mask = torch.ones(16, 16, dtype=torch.bool).tril() if masked else None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    module = traced(gradient, q, k, v)
    before = [tensor.clone() for tensor in module(q, k, v)]
    widen_products(module.graph)
    module.recompile()
    assert targets(module)[operator.getitem] > 0
    for old, new in zip(before, module(q, k, v), strict=True):
        assert new.dtype == torch.bfloat16
        torch.testing.assert_close(old.float(), new.float(), rtol=0.03, atol=0.03)


def test_factors_are_converted_once() -> None:
    x, w = bf16(8, 16), bf16(16, 16)
    module = traced(lambda x, w: (x @ w.mT, x @ w, w.mT @ x.mT), x, w)
    widen_products(module.graph)
    to_fp32 = [n for n in module.graph.nodes if n.target == CONVERT and n.args[1] == torch.float32]
    assert len(to_fp32) == 2


def test_other_products_stay() -> None:
    module = traced(lambda x, w: x @ w, torch.randn(8, 16), torch.randn(16, 4))
    before = str(module.graph)
    widen_products(module.graph)
    assert str(module.graph) == before


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("wide", sample(1, [True, False]))
def test_equal_sums_in_bf16_compile(wide: bool) -> None:
    """Inductor alone fails here: two equal sums in bf16."""
    torch.manual_seed(0)
    inputs = [bf16(4, 8, 64), bf16(64, 64), bf16(64), bf16(64, 64), bf16(64)]
    expected = [t.detach().float().requires_grad_() for t in inputs]
    two_branches(*expected).square().mean().backward()
    options = {"post_grad_custom_post_pass": GraphPass(wide=wide)}
    compiled = torch.compile(two_branches, fullgraph=True, options=options)  # type: ignore[arg-type]
    compiled(*inputs).square().mean().backward()
    for tensor, exact in zip(inputs, expected, strict=True):
        largest = exact.grad.abs().max().item()
        torch.testing.assert_close(tensor.grad.float(), exact.grad, rtol=0.02, atol=0.02 * largest)
    assert inputs[2].grad.data_ptr() != inputs[4].grad.data_ptr()
