"""What a worker computes: matrix products, attention, copies, elementwise work, the optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from slurmllm.backends.native.compiling import slow_bf16
from slurmllm.calibrate.measure.clock import Item
from slurmllm.calibrate.sample import Kind
from slurmllm.config.recipe import ModelConfig
from slurmllm.model.attention import rotary_table, rotate
from slurmllm.model.decoder import ACTIVATIONS, make_norm
from slurmllm.model.output import softmax_, statistics
from slurmllm.plan.flops import attention_flops, block_elements

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Together more than a worker's share of most processors' caches.
_COLD_BYTES, _LAYERS = 64 << 20, 16


def products(
    device: torch.device, tokens: tuple[int, ...], widths: tuple[int, ...], vocabulary: int
) -> Iterator[Item]:
    """Forward products and both their gradients: feed-forward matrices, and a head.

    Sizes are [m, n, k] of the forward product; the seconds are those of all three.

    Args:
        device: Where they are computed.
        tokens: Of micro batches.
        widths: Hidden sizes.
        vocabulary: Of the head, which is of a middling width.
    """
    middling = widths[len(widths) // 2]
    shapes = [(many, 4 * width, width) for many in tokens for width in widths]
    for precision, kind in _DTYPES.items():
        if device.type == "cpu" and kind == torch.bfloat16 and slow_bf16():
            kind = torch.float32  # as compiled blocks compute them there
        for m, n, k in (*shapes, (tokens[0], vocabulary, middling)):
            # In turn, as the layers of a model come: none finds its matrices in a cache.
            width = torch.empty((), dtype=kind).element_size()
            count = max(1, min(_LAYERS, _COLD_BYTES // ((m * k + n * k + m * n) * width)))
            layers = itertools.cycle(
                [
                    (
                        torch.randn(m, k, device=device, dtype=kind),
                        torch.randn(n, k, device=device, dtype=kind),
                        torch.randn(m, n, device=device, dtype=kind),
                    )
                    for _ in range(count)
                ]
            )

            def work(layers: Iterator[tuple[Tensor, Tensor, Tensor]] = layers) -> None:
                x, weight, gradient = next(layers)
                torch.mm(x, weight.T)
                torch.mm(gradient, weight)
                torch.mm(gradient.T, x)

            yield Item("product", precision, (m, n, k), work)


def attention(model: ModelConfig, precision: str, device: torch.device, batch: int) -> Item:
    """Attention's core, forward and backward."""
    shape = (batch, model.num_heads, model.seq_len, model.head_dim)
    q, k, v = (
        torch.randn(shape, device=device, dtype=_DTYPES[precision], requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn(shape, device=device, dtype=_DTYPES[precision])

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    flops = 3 * attention_flops(model, batch * model.seq_len, 1)
    return Item("attention", precision, (flops,), work)


def copy(device: torch.device, many_bytes: int) -> Item:
    """From one place in memory to another: each byte is read and written."""
    source = torch.ones(many_bytes // 4, device=device)
    target = torch.empty_like(source)
    return Item("copy", "", (2 * many_bytes,), lambda: target.copy_(source))


def elementwise(
    model: ModelConfig, precision: str, device: torch.device, batch: int, compiled: bool
) -> Iterator[Item]:
    """A block without its products, the passes over the logits, the optimizer's update.

    Bytes are those that the planner counts for the same work (`plan/flops.py`, `plan/step.py`), so
    that what a processor's caches spare it is part of what is measured.
    """
    made: Callable[[Any], Any] = _compile if compiled else lambda function: function
    tokens, kind = batch * model.seq_len, _DTYPES[precision]
    width = torch.empty((), dtype=kind).element_size()
    yield Item(
        "elementwise", "block", (3 * block_elements(model, tokens, 1, False) * width,),
        _block(model, tokens, kind, device, made),
    )  # fmt: skip
    logits = torch.randn(tokens, model.padded_vocab_size, device=device, dtype=kind)
    sums, softmax = made(statistics), made(softmax_)

    def over_logits() -> None:
        largest, total = sums(logits)
        softmax(logits, largest + total.log())

    # The planner counts four passes in fp32; two of them are made by the products.
    yield Item("elementwise", "logits", (4 * logits.numel() * 4,), over_logits)
    weights = [torch.nn.Parameter(torch.randn(1 << 22, device=device)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    update = torch.optim.AdamW(weights, lr=1e-3, fused=True)

    def optimize() -> None:
        for weight in weights:
            torch.linalg.vector_norm(weight.grad)
        update.step()

    yield Item("elementwise", "optimizer", (8 * 8 * (1 << 22) * 4,), optimize)


def _compile(function: Callable[..., Any]) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _block(
    model: ModelConfig,
    tokens: int,
    kind: torch.dtype,
    device: torch.device,
    made: Callable[[Any], Any],
) -> Callable[[], None]:
    """Norms, residual sums, rotary positions and activation, forward and backward."""
    heads = (1, tokens, model.num_heads, model.head_dim)
    stream, wide = (tokens, model.hidden_size), (tokens, model.ffn_hidden_size)
    norms = [make_norm(model).to(device, kind) for _ in range(2)]
    table = rotary_table(tokens, model.head_dim, model.rotary_pct, model.rotary_base).to(device)
    activation = ACTIVATIONS[model.activation]

    def forward(
        x: Tensor, attended: Tensor, fed: Tensor, q: Tensor, k: Tensor, up: Tensor
    ) -> tuple[Tensor, ...]:
        first, second = (norm(x) for norm in norms)
        turned = rotate(q, table), rotate(k, table)
        return first, second, x + attended + fed, *turned, activation(up)

    shapes = (stream, stream, stream, heads, heads, wide)
    inputs = [torch.randn(shape, device=device, dtype=kind, requires_grad=True) for shape in shapes]
    gradients = [
        torch.randn(shape, device=device, dtype=kind)
        for shape in (stream, stream, stream, heads, heads, wide)
    ]
    learnt = [*inputs, *(p for norm in norms for p in norm.parameters())]
    function = made(forward)

    def work() -> None:
        torch.autograd.grad(function(*inputs), learnt, gradients)

    return work


def groups(nodes: int, workers: int) -> dict[str, list[list[int]]]:
    """Ranks of the groups of each kind; all groups of a kind communicate at the same time."""
    found: dict[str, list[list[int]]] = {}
    if workers > 1:
        found["node"] = [list(range(n * workers, (n + 1) * workers)) for n in range(nodes)]
    if nodes > 1:
        found["network"] = [list(range(n, nodes * workers, workers)) for n in range(workers)]
    return found


def collectives(
    nodes: int, workers: int, device: torch.device, sizes: tuple[int, ...]
) -> Iterator[Item]:
    """All-reduces of every size, and the two halves of one for the largest (collective).

    The halves with the copy between parameters and one buffer that FSDP makes after it gathers and
    before it scatters.

    Args:
        nodes: In all.
        workers: Of a node.
        device: Where the tensors are.
        sizes: Bytes of the whole, on each worker.
    """
    for where, ranks in groups(nodes, workers).items():
        own, _ = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
        members = len(ranks[0])
        for size in sizes:
            yield _item("all_reduce", where, members, size, own, device)
        yield _item("all_gather", where, members, sizes[-1], own, device)
        yield _item("reduce_scatter", where, members, sizes[-1], own, device)


def _item(
    kind: Kind, where: str, members: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Item:
    numbers = max(1, size // 4 // members) * members
    whole, apart = (torch.zeros(numbers, device=device) for _ in range(2))
    share = torch.zeros(numbers // members, device=device)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, share, group=group)
        apart.copy_(whole)

    def scatter() -> None:
        whole.copy_(apart)
        dist.reduce_scatter_tensor(share, whole, group=group)

    def reduce() -> None:
        dist.all_reduce(whole, group=group)

    works = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}
    return Item(kind, where, (members, 4 * numbers), works[kind], together=True)
