"""Where `make gpu` says that a step's time goes, from events as torch.profiler gives them."""

from types import SimpleNamespace
from typing import Any

import pytest
from _gpu.kernels import STEPS, class_of, summary

CPU = SimpleNamespace(name="CPU")
HEAD, OPTIMIZER = "slurmllm.gpu head", "slurmllm.gpu optimizer"


# Names that torch.profiler gave on one H200 (torch 2.11), but for the last two.
@pytest.mark.parametrize(
    ("kernel", "ranges", "expected"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT", ["aten::mm", HEAD], "head: products"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT", ["aten::mm"], "blocks: products"),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1", [], "blocks: products"),
        ("nvjet_qqtst_128x128_128x6_2x1_v_bz_TNT", [OPTIMIZER], "optimizer: products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", [], "blocks: attention"),
        ("void pytorch_flash::flash_bwd_kernel<cutlass::bfloat16_t>", [], "blocks: attention"),
        ("triton_poi_fused__to_copy_3", [], "blocks: copies"),
        ("void at::native::elementwise_kernel<128, direct_copy_kernel_cuda>", [], "blocks: copies"),
        ("Memcpy HtoD (Pinned -> Device)", ["aten::copy_"], "blocks: copies"),
        ("triton_red_fused__to_copy_add_native_layer_norm_1", [], "blocks: other passes"),
        (
            "void at::native::multi_tensor_apply_kernel<LpNormFunctor>",
            ["aten::_foreach_norm", OPTIMIZER],
            "optimizer: norms",
        ),
        ("triton_poi_fused_add_copy_mul_0", ["step", OPTIMIZER], "optimizer: other passes"),
        (
            "void at::native::vectorized_elementwise_kernel<8, MulFunctor>",
            ["aten::mul", "_LinearCrossEntropyBackward"],
            "head: other passes",
        ),
        ("void embedding_backward_feature_kernel", [], "blocks: embedding"),
        ("a_kernel_of_tomorrow", [], "blocks: unknown"),
    ],
)
def test_classes(kernel: str, ranges: list[str], expected: str) -> None:
    assert class_of(kernel, ranges) == expected


def event(name: str, start: float, end: float, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        device_type=fields.get("device", SimpleNamespace(name="CUDA")),
        is_user_annotation=name.startswith("slurmllm"),
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
        kernels=[
            SimpleNamespace(name=n, duration=us) for n, us in fields.get("kernels", {}).items()
        ],
        cpu_parent=fields.get("parent"),
        self_cpu_time_total=end - start,
    )


def test_a_kernel_counts_once_where_it_was_launched() -> None:
    # Both products have one name; the device shows the annotation as an event of its own, too.
    outer = event(HEAD, 0, 10, device=CPU, kernels={HEAD: 9000})
    inner = event("aten::mm", 1, 2, device=CPU, parent=outer, kernels={"nvjet": 3000})
    events = [outer, inner, event(HEAD, 0, 9000), event("nvjet", 0, 3000)]
    # Of the second nobody knows who launched it; it overlaps a copy, and a gap follows both.
    events += [event("nvjet", 6000, 12000), event("Memcpy DtoH", 9000, 15000)]
    result = summary(events, on_cpu=False)
    assert STEPS == 3
    assert result["classes"] == {
        "blocks: products": 2.0,
        "blocks: copies": 2.0,
        "head: products": 1.0,
    }
    assert result["idle"] == 1.0
    assert result["kernels"][0] == {"class": "blocks: products", "name": "nvjet", "ms": 2.0}
