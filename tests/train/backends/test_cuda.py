"""The native backend on one GPU; `make gpu` runs these tests where there is one."""

import gzip
import json
import logging
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from mesh_pool import counted, micro_batches
from torch import Tensor

from slurmllm.analysis.calibrate.run import calibrate
from slurmllm.core.config.resolve import resolve
from slurmllm.launch.supervise.allocation import LocalAllocation
from slurmllm.plan.memory import worker_memory
from slurmllm.train.backends.native.device import Cuda, DeviceNumber, send
from slurmllm.train.backends.native.parallel import clip_factor, scale_
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model.attention import document_blocks, document_mask
from slurmllm.train.model.decoder import CausalCore, Mask
from slurmllm.train.model.init import local_part
from slurmllm.train.model.output import Output
from train.backends.conftest import NewBackend
from train.gang import Gang, curve, make_data, make_run, rows

# Inductor's advice for fp32.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32")]

GPU = "cluster.device=cuda"
GROUPED = ("model.family=llama", "model.rotary_pct=1.0", "model.num_kv_heads=2")
# Attention between documents by blocks needs sequences of at least one.
BLOCKS = ("data.mask=document", "model.seq_len=300", "train.compile=true")


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise if the host waits for the device."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(new_backend: NewBackend, *overrides: str) -> NativeBackend:
    backend = new_backend(GPU, *overrides)
    assert backend.deferred_metrics
    return backend


def step(backend: NativeBackend, number: int) -> tuple[DeviceNumber, DeviceNumber, DeviceNumber]:
    parts, labels = micro_batches(backend, number), counted(backend.config, number)
    return (
        backend.forward_backward(parts, labels),
        backend.optimizer_step(1e-2),
        backend.param_norm(),
    )


def figures(backend: NativeBackend, steps: int, first: int = 0) -> list[float]:
    return [float(x) for number in range(first, first + steps) for x in step(backend, number)]


def test_the_check_finds_a_wait() -> None:
    number = torch.ones((), device="cuda")
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.precision=bf16_mixed", "train.compile=true"),
        ("train.precision=bf16_sr", "optim.grad_clip=0.01"),
        ("train.precision=bf16_mixed", *BLOCKS, *GROUPED),
        ("train.precision=bf16_mixed", *BLOCKS, "train.activation_checkpointing=selective"),
        ("train.precision=bf16_mixed", "data.mask=document", *GROUPED),
        ("train.activation_checkpointing=full", "parallel.zero=3"),
    ],
    ids=str,
)
def test_no_step_waits_for_the_device(new_backend: NewBackend, overrides: tuple[str, ...]) -> None:
    backend = on_gpu(new_backend, *overrides)
    figures(backend, 2)  # compiles and allocates
    with no_waits():
        late = [step(backend, number) for number in range(2, 6)]
    assert all(float(value) > 0 for numbers in late for value in numbers)


def test_a_number_is_ready_before_what_was_enqueued_later() -> None:
    number = DeviceNumber(torch.full((), 2.5, device="cuda", dtype=torch.float64))
    torch.cuda._sleep(6_000_000_000)  # some seconds of the device's clock
    assert float(number) == 2.5
    assert not torch.cuda.current_stream().query(), "float() waited for the later work"


def test_memory_of_the_host_may_be_reused_at_once() -> None:
    torch.cuda._sleep(500_000_000)
    sent = [send(torch.full((1000,), number), torch.device("cuda")) for number in range(50)]
    assert [int(tensor.unique().item()) for tensor in sent] == list(range(50))


@pytest.mark.parametrize("mask", ["none", "document"])
def test_the_same_training_as_on_the_cpu(new_backend: NewBackend, mask: str) -> None:
    overrides = ("optim.grad_clip=0.5", f"data.mask={mask}")
    expected = figures(new_backend(*overrides), 6)  # type: ignore[arg-type]
    assert figures(on_gpu(new_backend, *overrides), 6) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping(dtype: torch.dtype) -> None:
    values = torch.randn(300, 200).to(dtype)
    norm = torch.linalg.vector_norm(values.double())
    for limit in (0.3, 1e9):
        on_cpu, on_device = [values.clone()], [values.cuda()]
        scale_(on_cpu, clip_factor(norm, limit))
        scale_(on_device, clip_factor(norm.cuda(), limit))
        assert torch.equal(on_device[0].cpu(), on_cpu[0])
    assert torch.equal(on_cpu[0], values)


def test_the_loss_s_gradient_is_not_rounded_as_a_whole() -> None:
    factor = 1.0194  # 0.4 % more than the next number in bf16
    torch.manual_seed(0)
    x, weight = torch.randn(1, 64, 32), torch.randn(128, 32)
    labels = torch.randint(0, 128, (1, 64))
    gradients = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        head = weight.bfloat16().to(device, dtype).requires_grad_()
        inputs = x.bfloat16().to(device, dtype)
        (Output(128)(inputs, head, labels.to(device)) * factor).backward()
        gradients.append(head.grad.double().cpu())
    exact, rounded = gradients
    assert float((rounded * exact).sum() / exact.square().sum()) == pytest.approx(1, abs=1.5e-3)


def leaves(tensors: Iterable[Tensor], device: str) -> list[Tensor]:
    """Copies whose gradients stay: each one is moved before it becomes a leaf."""
    return [x.detach().clone().to(device).requires_grad_() for x in tensors]


def test_grouped_attention_with_a_mask_has_a_fused_kernel() -> None:
    torch.manual_seed(0)
    shape = (2, 128)
    q, k, v = (torch.randn(*shape, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    positions = torch.arange(128).remainder(50).expand(2, -1)
    core, results = CausalCore(use_rotary=False), []
    for device in ("cpu", "cuda"):
        inputs = leaves((q, k, v), device)
        mask = document_mask(positions.to(device), torch.bfloat16)
        kernels = [torch.nn.attention.SDPBackend.MATH]
        if device == "cuda":
            kernels = [
                torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
                torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
            ]
        with torch.nn.attention.sdpa_kernel(kernels):
            out = core(*inputs, torch.empty(0), mask)
        out.float().square().sum().backward()
        results.append([out.detach(), *gradients(inputs)])
    for cpu, cuda in zip(*results, strict=True):
        assert deviation(cuda, cpu) < 0.02


def gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    values = [x.grad for x in tensors]
    assert all(value is not None for value in values)
    return [value for value in values if value is not None]


def deviation(tensor: Tensor, reference: Tensor) -> float:
    exact = reference.double().cpu()
    return float((tensor.double().cpu() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(  # a compilation each
    ("head_dim", "heads", "length"),
    [(16, (6, 2), 301), (80, (4, 4), 1024), (80, (6, 2), 128), (128, (4, 4), 301)],
)
def test_attention_by_blocks_equals_the_dense_mask(
    dtype: torch.dtype, tolerance: float, head_dim: int, heads: tuple[int, int], length: int
) -> None:
    torch.compiler.reset()  # Dynamo has at most eight graphs of a function
    torch.manual_seed(0)
    queries, keys = heads
    # Of one tensor, as in a block, and its gradient is one too.
    qkv = torch.randn(2, length, queries + 2 * keys, head_dim).to(dtype)
    weight = torch.randn(2, length, queries * head_dim)
    places = torch.arange(length)
    positions = torch.stack([places % 50, places % 200])
    core, none = CausalCore(use_rotary=False), torch.empty(0)

    def attend(qkv: Tensor, mask: Mask) -> Tensor:
        q, k, v = qkv.split([queries, keys, keys], dim=2)
        return core(q, k, v, none, mask)

    (exact,) = leaves([qkv.float()], "cpu")
    expected = attend(exact, document_mask(positions, torch.float32))
    (expected * weight).sum().backward()
    (inputs,) = leaves([qkv], "cuda")
    mask = Cuda.compile(document_blocks)(positions.cuda())
    out = Cuda.compile(attend)(inputs, mask)
    (out.float() * weight.cuda()).sum().backward()
    assert deviation(out.detach(), expected.detach()) < tolerance
    (ours,), (theirs,) = gradients([inputs]), gradients([exact])
    for part, other in zip(
        ours.split([queries, keys, keys], dim=2),
        theirs.split([queries, keys, keys], dim=2),
        strict=True,
    ):
        assert deviation(part, other) < tolerance


@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
def test_training_by_blocks_equals_the_dense_mask(new_backend: NewBackend, recomputed: str) -> None:
    settings = (*BLOCKS, *GROUPED, f"train.activation_checkpointing={recomputed}")
    expected = figures(on_gpu(new_backend, *settings, "train.compile=false"), 6)
    backend = on_gpu(new_backend, *settings)
    assert backend.chunks[0].document_blocks is not None
    assert figures(backend, 6) == pytest.approx(expected, rel=1e-3)


def test_the_same_bits_by_blocks(new_backend: NewBackend) -> None:
    """Attention by blocks adds in one order, forward and backward."""
    settings = (*BLOCKS, *GROUPED, "train.precision=bf16_mixed")
    assert figures(on_gpu(new_backend, *settings), 4) == figures(on_gpu(new_backend, *settings), 4)


def test_a_long_sequence_needs_no_mask_of_all_pairs() -> None:
    length = 65536  # of which a dense mask is 8.6 GB
    q, k, v = (torch.randn(1, length, heads, 64) for heads in (4, 2, 2))
    inputs = leaves((x.bfloat16() for x in (q, k, v)), "cuda")
    positions = torch.arange(length, device="cuda").remainder(4096).unsqueeze(0)
    core = Cuda.compile(CausalCore(use_rotary=False))
    torch.cuda.reset_peak_memory_stats()
    out = core(*inputs, torch.empty(0), Cuda.compile(document_blocks)(positions))
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() < 2**30
    # A document's first token attends to itself alone.
    first = out.view(length, 4, 64)[4096 * 7]
    assert torch.equal(first, inputs[2][0, 4096 * 7].repeat_interleave(2, dim=0))


def test_memory_between_steps_is_as_planned(new_backend: NewBackend) -> None:
    backend = on_gpu(
        new_backend,
        "model.hidden_size=1024",
        "model.ffn_hidden_size=4096",
        "model.num_heads=16",
        "model.vocab_size=32000",
        "train.precision=bf16_mixed",
    )
    figures(backend, 2)
    peak = backend.memory()
    at_rest = backend.memory()  # the second peak is the current use
    resting = worker_memory(backend.config, backend.mesh)
    planned = resting["weights"] + resting["optimizer"]
    assert planned <= at_rest.peak_bytes < 1.1 * planned + 2**27  # workspaces of cuBLAS
    assert at_rest.peak_bytes < peak.peak_bytes < peak.limit_bytes
    assert peak.limit_bytes <= torch.cuda.mem_get_info()[1]


def test_an_asynchronous_save_copies_while_the_device_computes(
    new_backend: NewBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = ("model.hidden_size=1024", "model.ffn_hidden_size=4096", "model.num_heads=16")
    backend = on_gpu(new_backend, "checkpoint.asynchronous=true", *sizes)
    for folder in (tmp_path / "first", tmp_path / "second"):  # the second reuses host memory
        figures(backend, 2)
        saved = [local_part(p).detach().clone() for p in backend.model.parameters()]
        folder.mkdir()
        with caplog.at_level(logging.WARNING):
            save = backend.save_shards(folder)
            expected = figures(backend, 2, first=7)  # overwrites the weights
            save.wait()
            save.finish()
        assert "cudaHostRegister" not in caplog.text, "the copies were not pinned"
    backend.load_shards(tmp_path / "second")
    for parameter, before in zip(backend.model.parameters(), saved, strict=True):
        assert torch.equal(local_part(parameter), before)
    # Attention's backward pass on CUDA adds in any order.
    assert figures(backend, 2, first=7) == pytest.approx(expected, rel=1e-3)


def test_calibration() -> None:
    config = resolve("tiny_neox", "local", [GPU, "train.compile=false"])
    hardware = calibrate(config, LocalAllocation(), print, quick=True).hardware
    assert hardware.bf16_tflops > 0.05
    assert hardware.memory_gb_s > 10
    assert hardware.memory_gib == pytest.approx(torch.cuda.mem_get_info()[1] / 2**30, rel=0.01)


_NO_WAITS = """
import sys
from pathlib import Path
import torch
from slurmllm.core.run.rundir import RunDir
from slurmllm.train import loop
from slurmllm.train.worker import run_worker

run_step = loop.run_step

def watched(job):
    if job.step >= 2:
        torch.cuda.set_sync_debug_mode("error")
    try:
        return run_step(job)
    finally:
        if job.step > 2:
            print("watched step", job.step, flush=True)
            torch.cuda.set_sync_debug_mode("default")

loop.run_step = watched
sys.exit(run_worker(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
"""


def test_a_run_reads_its_metrics_late(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    # No save before the last step: its thread waits for its copies.
    options = ("train.steps=12", "checkpoint.every_steps=100")
    on_cpu = Gang(make_run(tmp_path / "cpu", data, *options)).finish()
    run = make_run(tmp_path / "cuda", data, GPU, "train.compile=true", *options)
    gang = Gang(run, entry=_NO_WAITS)
    gang.finish()
    assert gang.output().count("watched step") == 10
    assert [row["step"] for row in rows(run, 0)] == list(range(1, 13))
    assert "optimizer_s" not in rows(run, 0)[-1], "the host's clock cannot tell the parts apart"
    for number, loss_on_gpu in curve(run).items():
        assert loss_on_gpu == pytest.approx(curve(on_cpu)[number], rel=1e-2)


def test_a_profile_is_of_the_device(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    options = (GPU, "train.steps=6", "checkpoint.every_steps=100")
    plain = Gang(make_run(tmp_path / "plain", data, *options)).finish()
    profile = ("profile.steps=[3, 4]", "profile.memory=true")
    run = Gang(make_run(tmp_path / "run", data, *options, *profile)).finish()
    assert curve(run) == curve(plain)
    with gzip.open(run.trace(0, 0)) as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert {f"slurmllm.{name}" for name in ("step 3", "step 4", "forward", "backward")} <= {
        event.get("name") for event in events
    }
    assert run.memory_snapshot(0, 0).stat().st_size > 0


def test_marks_take_the_time_of_the_device() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began, enqueued = time.perf_counter(), Cuda().mark()
    for _ in range(50):
        x = (x @ x).tanh()
    done = Cuda().mark()
    assert time.perf_counter() - began < done - enqueued, "the host runs ahead"
    assert done - enqueued == pytest.approx(time.perf_counter() - began, rel=0.2)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("setting", ["train.compile=false", "train.compile=true"])
def test_fp8_products_stay_near_bf16(new_backend: NewBackend, recipe: str, setting: str) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    sizes = *GROUPED, setting  # BLOCKS has 600 tokens, which is no multiple of 16
    bf16 = on_gpu(new_backend, *sizes, "train.precision=bf16_mixed")
    expected = figures(bf16, 3)
    fp8 = on_gpu(new_backend, *sizes, "train.precision=fp8_mixed", f"train.fp8_recipe={recipe}")
    assert figures(fp8, 3) == pytest.approx(expected, rel=5e-2)
    assert figures(fp8, 3) != expected
