"""What workers measure, and how they time it.

Matrix products, attention, copies, elementwise work, the optimizer and collectives; their tensors
are made on torch's default device.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from slurmllm.analysis.calibrate.node import PRODUCT_SIZES, Kind, Sample, Task
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.resolve import resolve
from slurmllm.plan.parameters import attention_flops, block_elements
from slurmllm.train.backends.native.compiling import slow_bf16
from slurmllm.train.model.attention import rotary_table, rotate
from slurmllm.train.model.decoder import ACTIVATIONS, make_norm
from slurmllm.train.model.output import softmax_, statistics

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MIB = 1 << 20
# Together more than a worker's share of most processors' caches.
_COLD_BYTES = 64 * _MIB
_LAYERS = 16

Work = Callable[[], object]


@dataclass(frozen=True)
class Scale:
    """Sizes and durations of the measurements."""

    model: ModelConfig  # model of attention and elementwise work
    batch: int  # its sequences in a micro batch
    tokens: tuple[int, ...]  # tokens of the matrix products
    widths: tuple[int, ...]  # hidden sizes of the matrix products
    copied_bytes: int  # size of a copy, far larger than the caches
    collective_bytes: tuple[int, ...]  # sizes of the collectives, smallest first
    budget_s: float  # time for each measurement and round, s
    rounds: int  # rounds of all measurements


def scale_of(task: Task) -> Scale:
    if task.quick:
        model = _model(64, 2, 1024, 64)
        return Scale(model, 2, (128,), (64, 128, 256), 8 * _MIB, (1024, _MIB), 0.02, 1)
    products = PRODUCT_SIZES[task.device]
    if task.device == "cuda":
        # Attention of the model whose steps are timed: its kernels have been chosen then.
        model = _model(2048, 16, 50304, 2048)
        sizes = (8 * 1024, 16 * _MIB, 256 * _MIB)
        return Scale(model, 4, *products, 1024 * _MIB, sizes, 0.1, 3)
    model = _model(512, 8, 16384, 512)
    sizes = (1024, _MIB, 16 * _MIB)
    return Scale(model, 4, *products, 256 * _MIB, sizes, 0.15, 3)


def _model(hidden: int, heads: int, vocabulary: int, length: int) -> ModelConfig:
    overrides = [
        f"model.hidden_size={hidden}",
        f"model.num_heads={heads}",
        f"model.ffn_hidden_size={4 * hidden}",
        f"model.vocab_size={vocabulary}",
        f"model.seq_len={length}",
    ]
    return resolve("tiny_neox", "local", overrides).recipe.model


@dataclass(frozen=True)
class Item:
    """A measurement; `kind`, `of` and `sizes` as in `Sample`."""

    kind: Kind
    of: str
    sizes: tuple[int, ...]
    work: Work  # the function to time
    together: bool = False  # whether all workers must call it equally often, as with collectives


def measure(
    items: Sequence[Item],
    device: torch.device,
    budget_s: float,
    rounds: int,
    limit_s: float = math.inf,
) -> None:
    """Time all items in turn, several times; rank 0 writes the results (collective).

    In turn, so that a disturbance of the machine affects one round of some items only. Workers
    start each item simultaneously and the result is the mean over them: they share a node's
    memory, CPUs and links as in training.

    Args:
        budget_s: Time for each item and round, s.
        limit_s: For everything; what it cuts short is shorter, and has fewer rounds, but one.
    """
    begun = time.monotonic()
    seconds = list[list[float]]()
    if limit_s < math.inf:  # the same on all workers, as are the calls of collectives
        limit_s = _least(limit_s, device)
        budget_s = min(budget_s, limit_s / len(items) / (rounds + 1))  # and each one's first call
    for _ in range(rounds):
        seconds.append([_seconds(item, device, budget_s) for item in items])
        if limit_s < math.inf and _least(limit_s - time.monotonic() + begun, device) <= 0:
            break
    durations = [median(of_item) for of_item in zip(*seconds, strict=True)]
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, durations)
    if dist.get_rank() == 0:
        for item, values in zip(items, zip(*everyone, strict=True), strict=True):
            Sample(kind=item.kind, of=item.of, sizes=item.sizes, value=fmean(values)).write()


def _seconds(item: Item, device: torch.device, budget_s: float) -> float:
    """Return mean duration of as many calls as fit into the budget, s."""
    item.work()  # the first call compiles and allocates
    _wait(device)
    dist.barrier()
    if item.together:
        once = torch.tensor(_counted(item.work, device, 1), device=device)
        # All workers must use one count, or the last collective never completes.
        dist.all_reduce(once, dist.ReduceOp.MAX)
        count = max(2, min(1000, round(budget_s / float(once))))
        return _counted(item.work, device, count) / count
    # Not collective: workers need not agree on the number of calls.
    begun = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - begun < budget_s:
        item.work()
        count += 1
        if count % 10 == 0:  # or the device's queue would hold far more than the budget
            _wait(device)
    _wait(device)
    return (time.perf_counter() - begun) / count


def _least(value: float, device: torch.device) -> float:
    minimum = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(minimum, dist.ReduceOp.MIN)
    return float(minimum)


def _counted(work: Work, device: torch.device, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def products(sizes: Mapping[str, Sequence[tuple[int, int, int]]]) -> Iterator[Item]:
    """Yield forward products [m, n, k] by precision; the seconds are those of the gradients too."""
    for precision, kind in _DTYPES.items():
        on_cpu = torch.get_default_device().type == "cpu"
        if on_cpu and kind == torch.bfloat16 and slow_bf16():
            kind = torch.float32  # as compiled blocks compute them there
        for m, n, k in sizes[precision]:
            # In turn, as the layers of a model come: none finds its matrices in a cache.
            width = torch.empty((), dtype=kind).element_size()
            count = max(1, min(_LAYERS, _COLD_BYTES // ((m * k + n * k + m * n) * width)))
            layers = itertools.cycle(
                [
                    [torch.randn(shape, dtype=kind) for shape in ((m, k), (n, k), (m, n))]
                    for _ in range(count)
                ]
            )

            # Bound as a default: the loop assigns `layers` again before the items are timed.
            def work(layers: Iterator[list[Tensor]] = layers) -> None:
                x, weight, gradient = next(layers)
                torch.mm(x, weight.T)
                torch.mm(gradient, weight)
                torch.mm(gradient.T, x)

            yield Item("product", precision, (m, n, k), work)


def attention(model: ModelConfig, precision: str, batch: int) -> Item:
    shape = (batch, model.num_heads, model.seq_len, model.head_width)
    q, k, v = (torch.randn(shape, dtype=_DTYPES[precision], requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, dtype=_DTYPES[precision])

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    flops = 3 * attention_flops(model, batch * model.seq_len, 1)
    return Item("attention", precision, (flops,), work)


def copy(many_bytes: int) -> Item:
    source = torch.ones(many_bytes // 4)
    target = torch.empty_like(source)
    # Each byte is read and written.
    return Item("copy", "", (2 * many_bytes,), lambda: target.copy_(source))


def elementwise(model: ModelConfig, precision: str, batch: int, compiled: bool) -> Iterator[Item]:
    """Yield a block without its products, the passes over the logits, the optimizer's update.

    Bytes are those that the planner counts for the same work (`plan/parameters.py`,
    `plan/step.py`), so that what a processor's caches spare it is part of what is measured.
    """

    def made(function: Callable[..., Any]) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=False) if compiled else function

    tokens = batch * model.seq_len
    kind = _DTYPES[precision]
    width = torch.empty((), dtype=kind).element_size()
    moved = 3 * block_elements(model, tokens, 1, False) * width
    yield Item("elementwise", "block", (moved,), _block(model, tokens, kind, made))
    logits = torch.randn(tokens, model.padded_vocab_size, dtype=kind)
    sums = made(statistics)
    softmax = made(softmax_)

    def over_logits() -> None:
        largest, total = sums(logits)
        softmax(logits, largest + total.log())

    # The planner counts four passes in fp32; two of them are made by the products.
    yield Item("elementwise", "logits", (4 * logits.numel() * 4,), over_logits)
    weights = [torch.nn.Parameter(torch.randn(1 << 22)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    update = torch.optim.AdamW(weights, lr=1e-3, fused=True)

    def optimize() -> None:
        for weight in weights:
            torch.linalg.vector_norm(weight.grad)
        update.step()

    # Reads and writes of AdamW (8, as in plan/step.py), of 8 tensors of 2^22 fp32 numbers.
    yield Item("elementwise", "optimizer", (8 * 8 * (1 << 22) * 4,), optimize)


def _block(
    model: ModelConfig,
    tokens: int,
    kind: torch.dtype,
    made: Callable[[Any], Any],
) -> Callable[[], None]:
    """Return norms, residual sums, rotary positions and activation, forward and backward."""
    heads = (1, tokens, model.num_heads, model.head_width)
    stream = (tokens, model.hidden_size)
    wide = (tokens, model.ffn_hidden_size)
    norms = [make_norm(model).to(kind) for _ in range(2)]
    table = rotary_table(tokens, model.head_width, model.rotary_pct, model.rotary_base)
    table = table.to(torch.get_default_device())
    activation = ACTIVATIONS[model.activation]

    def forward(
        x: Tensor, attended: Tensor, fed: Tensor, q: Tensor, k: Tensor, up: Tensor
    ) -> tuple[Tensor, ...]:
        first, second = (norm(x) for norm in norms)
        turned = rotate(q, table), rotate(k, table)
        return first, second, x + attended + fed, *turned, activation(up)

    shapes = (stream, stream, stream, heads, heads, wide)
    inputs = [torch.randn(shape, dtype=kind, requires_grad=True) for shape in shapes]
    gradients = [torch.randn(shape, dtype=kind) for shape in shapes]
    learnt = [*inputs, *(p for norm in norms for p in norm.parameters())]
    function = made(forward)

    def work() -> None:
        torch.autograd.grad(function(*inputs), learnt, gradients)

    return work


def groups(nodes: int, workers: int) -> dict[str, list[list[int]]]:
    """Return the ranks of the groups of each kind, which communicate at the same time."""
    ranks = {}
    if workers > 1:
        ranks["node"] = [list(range(n * workers, (n + 1) * workers)) for n in range(nodes)]
    if nodes > 1:
        ranks["network"] = [list(range(n, nodes * workers, workers)) for n in range(workers)]
    return ranks


def collectives(nodes: int, workers: int, sizes: tuple[int, ...]) -> Iterator[Item]:
    """Yield all-reduces of every size, and the two halves of one for the largest (collective).

    The halves with the copy between parameters and one buffer that FSDP makes after it gathers and
    before it scatters.

    Args:
        sizes: Bytes of the whole, on each worker.
    """
    for span, ranks in groups(nodes, workers).items():
        # Collective over all ranks; a rank that skips it blocks the others.
        group, _ = dist.new_subgroups_by_enumeration(ranks)
        members = len(ranks[0])
        for size in sizes:
            yield _item("all_reduce", span, members, size, group)
        yield _item("all_gather", span, members, sizes[-1], group)
        yield _item("reduce_scatter", span, members, sizes[-1], group)


def _item(kind: Kind, span: str, members: int, size: int, group: dist.ProcessGroup) -> Item:
    # fp32 numbers, in equal shares: the tensor collectives accept no others.
    numbers = max(1, size // 4 // members) * members
    whole, apart = (torch.zeros(numbers) for _ in range(2))
    share = torch.zeros(numbers // members)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, share, group=group)
        apart.copy_(whole)

    def scatter() -> None:
        whole.copy_(apart)
        dist.reduce_scatter_tensor(share, whole, group=group)

    def reduce() -> None:
        dist.all_reduce(whole, group=group)

    works = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}
    return Item(kind, span, (members, 4 * numbers), works[kind], together=True)
