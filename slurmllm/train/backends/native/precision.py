"""The formats of each precision mode, and its optimizer: AdamW, or one that rounds stochastically.

| mode | weights and optimizer state | products | gradient sums |
|---|---|---|---|
| fp32 | fp32 | fp32 | fp32 |
| bf16_mixed | fp32 | bf16 | fp32 |
| fp8_mixed | fp32 | bf16, those of the blocks' matrices fp8 (`float8.py`) | fp32 |
| bf16_sr | bf16, each update rounded stochastically | bf16 | fp32, then bf16 |
| bf16 | bf16, each update rounded to nearest | bf16 | fp32, then bf16 |

bf16_sr and bf16 use 8 bytes per parameter, 2 each for weight, gradient and the two moments; the
others use 16. All compute an update in fp32.

Rounding to nearest loses an update far below the spacing of bf16 (2⁻⁸ of the value) at every step;
stochastic rounding keeps it on average (Gupta et al. 2015, arXiv 1502.02551; Zamirai et al. 2020,
arXiv 2010.06192). Both moments are rounded so too: rounded to nearest, a second moment with a beta2
of 0.999 would never decrease.

The random bits are a hash of (seed, step, parameter's name, row, column), with row and column in
the whole parameter. So all copies of an element, on tensor-parallel workers or at both ends of a
pipeline, are rounded alike and stay equal; every mesh rounds alike; and a resumed run rounds as an
uninterrupted one without any saved state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from slurmllm.core.config.recipe import ADAMW, OptimConfig, Recipe, TrainConfig
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import by_key
from slurmllm.core.plugins import build
from slurmllm.train.backends.native.device import KINDS, send
from slurmllm.train.model.init import local_part, local_region

NamedParameters = Iterable[tuple[str, Tensor]]
Options = dict[str, Any]  # of a function, or of a group of parameters
_PURE = ("bf16_sr", "bf16")


def store_weights(model: nn.Module, precision: str) -> None:
    """Convert the parameters, on the meta device, to the format in which they are stored."""
    if precision not in _PURE:
        return
    # Not model.to(): the rotary table stays fp32, because bf16 cannot separate far positions.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.to(torch.bfloat16)))


def compute_dtype(precision: str) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16


def sharding_policy(precision: str) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def make_optimizer(named_parameters: NamedParameters, recipe: Recipe) -> torch.optim.Optimizer:
    """Make the recipe's optimizer over this worker's shards, under their names in the whole model.

    Raises a ConfigError if another package's optimizer, its settings or what it makes are wrong.
    """
    optim = recipe.optim
    if optim.name == ADAMW:
        return make_adamw(named_parameters, optim, recipe.train)
    parameters = list(named_parameters)
    path = "optim.name"
    made = build(
        "optimizers", optim.name, path, torch.optim.Optimizer, optim.settings, parameters, recipe
    )
    held = [id(tensor) for group in made.param_groups for tensor in group["params"]]
    # One that is left out would silently stay as it was initialized.
    if faults := [name for name, tensor in parameters if held.count(id(tensor)) != 1]:
        raise ConfigError(
            f"{path}: {optim.name!r} has {len(faults)} of {len(parameters)} parameters not exactly "
            f"once in its groups, such as {faults[0]}; correct the plugin"
        )
    return made


def make_adamw(
    named_parameters: NamedParameters, optim: OptimConfig, train: TrainConfig
) -> torch.optim.Optimizer:
    # An optimizer of another package that updates some parameters by AdamW calls it too.
    if train.precision == "bf16_sr":
        return StochasticAdamW(named_parameters, optim, train)
    return torch.optim.AdamW(adamw_groups(named_parameters, optim), fused=True)


def adamw_groups(named_parameters: NamedParameters, optim: OptimConfig) -> list[Options]:
    # Matrices and embeddings have two dimensions; norms and biases have one. The fused kernel needs
    # all tensors of a group on one mesh.
    def kind(parameter: Tensor) -> tuple[bool, Any]:
        decayed = parameter.ndim > 1 or optim.decay_norms_and_biases
        return decayed, getattr(parameter, "device_mesh", None)

    return [
        {
            "params": tensors,
            "lr": optim.lr,
            "betas": optim.betas,
            "eps": optim.eps,
            "weight_decay": optim.weight_decay if decayed else 0.0,
        }
        for (decayed, _), tensors in by_key(
            (kind(parameter), parameter) for _, parameter in named_parameters
        ).items()
    ]


def initial_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state before the first step, by torch's names."""
    return {
        "step": torch.zeros((), dtype=torch.float32),  # on the CPU, which reads it
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


class StochasticAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW, computed in fp32 from bf16 and rounded back stochastically.

    The state has the names and shapes of AdamW's, so a run of any precision can load it. Copies of
    a parameter must have the same name. Compiled or not, results on CPUs have the same bits.
    """

    def __init__(
        self, named_parameters: NamedParameters, optim: OptimConfig, train: TrainConfig
    ) -> None:
        named = list(named_parameters)
        names = {parameter: name for name, parameter in named}
        super().__init__(adamw_groups(named, optim), {})
        self._keys = _RandomKeys(
            [(names[p], p) for group in self.param_groups for p in group["params"]], train.seed
        )
        self._update: Callable[..., None] = _update_in_slices
        if train.compile:
            kind = next(iter(names)).device.type
            self._update = KINDS[kind].compile(update_, dynamic=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.state[parameter] for parameter in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    state.update(initial_state(parameter))
            torch._foreach_add_([state["step"] for state in states], 1)
            factors: dict[int, Tensor] = {}  # by step, usually one for all parameters
            for parameter, state in zip(parameters, states, strict=True):
                step = int(state["step"].item())
                keys, columns = self._keys.get(parameter, step)
                if step not in factors:
                    factors[step] = coefficients(group, step, keys.device)
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                # Detached: for torch.compile a parameter has no dynamic shape.
                shards = [local_part(tensor).detach() for tensor in tensors]
                if shards[0].numel():
                    self._update(*shards, keys, columns, factors[step])


def coefficients(group: Mapping[str, Any], step: int, device: torch.device) -> Tensor:
    """Return those of `adamw_step`, fp32 [7]; a tensor, or each step would compile again."""
    lr = float(group["lr"])
    beta1, beta2 = group["betas"]
    size = lr / (1 - beta1**step)
    root = (1 - beta2**step) ** -0.5
    keep = 1 - lr * group["weight_decay"]
    values = [keep, 1 - beta1, beta2, 1 - beta2, size, root, group["eps"]]
    return send(torch.tensor(values, dtype=torch.float32), device)


def adamw_step(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, coefficients: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight and moments after a step, of fp32 weight, gradient and moments.

    Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2.
    """
    keep, one_minus_beta1, beta2, one_minus_beta2, size, root, eps = coefficients.unbind()
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + g * g * one_minus_beta2
    return w * keep - size * m / (v.sqrt() * root + eps), m, v


def specialize_on_alignment(length: int) -> None:
    """Have torch.compile make a graph of its own for rows of a multiple of 16 elements.

    Triton then accesses 16 bytes at a time, and without knowing the multiple one element.
    """
    if length % 16 == 0:  # Dynamo guards on what is compared
        return


def update_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    keys: Tensor,
    columns: Tensor,
    coefficients: Tensor,
) -> None:
    """Make a step of AdamW in place, rounded stochastically.

    Tensors are bf16 [rows, columns], or [columns] of one row; `keys`, int32 [rows, 1], and
    `columns`, int32 [columns], are the numbers in the whole parameter that the random bits are
    hashed from.
    """
    specialize_on_alignment(weight.shape[-1])
    if weight.ndim == 1:
        weight, exp_avg, exp_avg_sq = (x.unsqueeze(0) for x in (weight, exp_avg, exp_avg_sq))
    bits = scramble(keys ^ columns)
    first = bits & 0xFFFF
    second = (bits >> 16) & 0xFFFF
    w, g, m, v = (tensor.float() for tensor in (weight, gradient, exp_avg, exp_avg_sq))
    w, m, v = adamw_step(w, g, m, v, coefficients)
    # The moments share their bits: each is unbiased, and the effect of their correlation is of the
    # order of 2⁻¹⁶. The weight has bits of its own.
    weight.copy_(round_to_bf16(w, second))
    exp_avg.copy_(round_to_bf16(m, first))
    exp_avg_sq.copy_(round_to_bf16(v, first))


def _update_in_slices(*tensors: Tensor) -> None:
    by_row, by_column = tensors[:5], tensors[5:]  # weight to keys; columns and coefficients
    weight = by_row[0]
    if weight.ndim == 1:
        update_(*tensors)
        return
    each = max(1, KINDS[weight.device.type].update_elements // weight.shape[1])
    for start in range(0, weight.shape[0], each):
        update_(*(tensor[start : start + each] for tensor in by_row), *by_column)


def round_to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """Round fp32 to one of the two neighbours in bf16, on average x; returned as fp32.

    bf16 is the upper half of fp32. Adding 16 random bits (int32, uniform in [0, 2¹⁶)) to the lower
    half carries into the upper half with the right probability; values exact in bf16 never change.
    """
    return ((x.view(torch.int32) + random) & -0x10000).view(torch.float32)


def scramble(x: Tensor) -> Tensor:
    """Hash int32 to int32, one to one; all bits of the result are usable.

    Shifts and multipliers of Wellons, "Prospecting for hash functions" (2018), lowbias32. int32
    products wrap around on every device, and its right shifts keep the sign, hence the masks.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


class _RandomKeys:
    """The keys that the random bits of each element are hashed from; one tensor has all rows.

    A shard is rows and columns of the whole parameter; a vector is one row.
    """

    _step = -1

    def __init__(self, named_parameters: Sequence[tuple[str, Tensor]], seed: int) -> None:
        self._seed = seed
        self._columns: dict[Tensor, Tensor] = {}
        self._count: dict[Tensor, int] = {}
        rows = []
        for name, parameter in named_parameters:
            region = local_region(parameter)
            row, column = region if len(region) == 2 else (slice(0, 1), region[0])
            options: Options = {"dtype": torch.int32, "device": local_part(parameter).device}
            numbers = torch.arange(row.start, row.stop, **options)
            rows.append(scramble(numbers ^ _hash_of(seed, name)))
            self._count[parameter] = len(numbers)
            self._columns[parameter] = torch.arange(column.start, column.stop, **options)
        self._rows = torch.cat(rows).unsqueeze(1)
        self._keys: dict[Tensor, Tensor] = {}

    def get(self, parameter: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the keys of the rows in a step, int32 [rows, 1], and the columns, int32."""
        if step != self._step:
            keys = scramble(self._rows ^ _hash_of(self._seed, step))
            counts = list(self._count.values())
            self._keys = dict(zip(self._count, torch.split(keys, counts), strict=True))
            self._step = step
        return self._keys[parameter], self._columns[parameter]


def _hash_of(*values: object) -> int:  # int32
    digest = hashlib.sha256("/".join(map(str, values)).encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)
