"""What each precision mode keeps, and whether stochastic rounding is what it claims to be."""

import hashlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import SupportsFloat

import pytest
import torch
from amounts import sample
from command_line import call
from mesh_pool import Case, MeshPool, small_run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from slurmllm.core.config.recipe import OptimConfig, TrainConfig
from slurmllm.train.backends.native.precision import StochasticAdamW, round_to_bf16, scramble
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model.init import local_part
from train.backends.conftest import LABELS, NewBackend, batch, micro_batches, whole
from train.gang import Gang, curve, make_data, make_run, small_config

pytestmark = pytest.mark.numerics

MODES = ("fp32", "bf16_mixed", "bf16_sr", "bf16")
PURE = ("bf16_sr", "bf16")


def new(new_backend: NewBackend, precision: str, *overrides: str) -> NativeBackend:
    return new_backend(f"train.precision={precision}", *overrides)


def train(backend: NativeBackend, steps: int, first: int = 0) -> list[float]:
    figures: list[SupportsFloat] = []
    for step in range(first, first + steps):
        loss = backend.forward_backward(micro_batches(batch(seed=step % 2), 4), LABELS)
        figures += [loss, backend.optimizer_step(2e-3), backend.param_norm()]
    return [float(figure) for figure in figures]


def optimizer(*weights: Tensor, seed: int = 0, compiled: bool = False, **options: float):
    optim = OptimConfig(
        lr=options.get("lr", 1e-3),
        betas=(0.9, options.get("beta2", 0.95)),
        weight_decay=options.get("weight_decay", 0.0),
        decay_norms_and_biases=True,
    )
    train = TrainConfig(steps=1, global_batch=1, micro_batch=1, seed=seed, compile=compiled)
    return StochasticAdamW([(f"weight {i}", w) for i, w in enumerate(weights)], optim, train)


def spacing(x: Tensor) -> Tensor:
    """Between the bf16 values around x."""
    return torch.exp2(x.abs().log2().floor() - 7)


# The rounding itself


def test_rounding_is_exactly_unbiased() -> None:
    x = torch.tensor([0.3, -0.3, 1.0039, 1e-3, -7e5, 1e-39, 3.3e38, 0.0])
    every = torch.arange(2**16, dtype=torch.int32)
    rounded = round_to_bf16(x.unsqueeze(1), every)
    assert torch.equal(rounded.bfloat16().float(), rounded), "bf16 holds it"
    assert torch.equal(rounded.double().mean(1), x.double()), "over all random numbers there are"
    assert ((rounded - x.unsqueeze(1)).abs().amax(1)[:5] < spacing(x)[:5]).all()


def test_what_bf16_holds_never_moves() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() | x.isinf()].float()
    for random in (0, 1, 2**15, 2**16 - 1):
        assert torch.equal(round_to_bf16(x, torch.tensor(random, dtype=torch.int32)), x)


def test_hash_is_the_one_it_is_named_after() -> None:
    def lowbias32(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ x >> shift) * factor % 2**32
        return x ^ x >> 16

    inputs = torch.randint(-(2**31), 2**31, (1003,), dtype=torch.int32)  # odd: vectors and the rest
    expected = torch.tensor([lowbias32(x % 2**32) for x in inputs.tolist()])
    assert torch.equal(scramble(inputs).long() % 2**32, expected)


def test_random_bits_are_even_and_unrelated() -> None:
    weights = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    random_keys = optimizer(*weights, seed=5)._keys
    halves = []
    for step in range(1, 201):
        for weight in weights:
            keys, columns = random_keys.get(weight, step)
            bits = scramble(keys ^ columns).long() % 2**32
            halves.append(torch.stack([bits >> 16, bits & 0xFFFF]).double() / 2**16 - 0.5)
    # [steps, weights, halves, rows, columns], each in [-0.5, 0.5), variance 1/12
    drawn = torch.stack(halves).unflatten(0, (200, 2))

    def sigmas(x: Tensor) -> float:
        return x.mean().item() / x.std().item() * x.numel() ** 0.5

    assert abs(sigmas(drawn)) < 4
    of_elements = drawn.mean(0) / (1 / 12 / 200) ** 0.5
    assert of_elements.std().item() == pytest.approx(1, abs=0.03)
    for a, b in (
        (drawn[1:], drawn[:-1]),  # steps
        (drawn[:, 0], drawn[:, 1]),  # parameters
        (drawn[:, :, 0], drawn[:, :, 1]),  # the weight's bits and the moments'
        (drawn[..., 1:, :], drawn[..., :-1, :]),  # rows
        (drawn[..., 1:], drawn[..., :-1]),  # columns
    ):
        assert abs(sigmas(a * b)) < 4
    other = optimizer(*weights, seed=6)._keys
    assert not torch.equal(other.get(weights[0], 1)[0], random_keys.get(weights[0], 1)[0])


# The optimizer


def test_it_is_adamw_but_for_the_rounding() -> None:
    torch.manual_seed(3)
    for weight in (torch.randn(300, 400).bfloat16(), torch.randn(77).bfloat16()):
        ours = optimizer(weight, weight_decay=0.1, lr=3e-3)
        for _ in range(5):
            state = {k: v.clone() for k, v in ours.state[weight].items()}
            exact = weight.float()
            theirs = torch.optim.AdamW([exact], 3e-3, (0.9, 0.95), weight_decay=0.1)
            if state:
                exact_state = {k: v.float() for k, v in state.items()}
                theirs.load_state_dict({**theirs.state_dict(), "state": {0: exact_state}})
            weight.grad = torch.randn_like(weight)
            exact.grad = weight.grad.float()
            ours.step()
            theirs.step()
            results = [(weight, exact)]
            for name in ("exp_avg", "exp_avg_sq"):
                results.append((ours.state[weight][name], theirs.state[exact][name]))
            for rounded, fp32 in results:
                # Where a sum cancels to almost nothing, fp32's own rounding would be seen.
                off = (rounded.float() - fp32) / spacing(fp32.abs().clamp(min=1e-2))
                assert off.abs().max() < 1.01, "one of the two neighbours"
                assert off.abs().max() > 0.6, "and not always the nearest"
                assert abs(off.mean()) < 4 * 0.5 / off.numel() ** 0.5
        assert ours.state[weight]["step"] == 5


def test_small_updates_arrive_on_average() -> None:
    start = torch.ones(4096)
    weights = {"fp32": start.clone(), "bf16": start.bfloat16(), "bf16_sr": start.bfloat16()}
    optimizers = {
        "fp32": torch.optim.AdamW([weights["fp32"]], 1e-4),
        "bf16": torch.optim.AdamW([weights["bf16"]], 1e-4),
        "bf16_sr": optimizer(weights["bf16_sr"], lr=1e-4, weight_decay=0.01),
    }
    for _ in range(100):
        for mode, weight in weights.items():
            weight.grad = torch.full_like(weight, 1e-3)
            optimizers[mode].step()
    moved = {mode: (weight.float() - start).mean().item() for mode, weight in weights.items()}
    assert moved["fp32"] == pytest.approx(-0.0101, rel=1e-2)
    assert moved["bf16"] == 0, "each step is a fortieth of bf16's spacing"
    assert moved["bf16_sr"] == pytest.approx(moved["fp32"], rel=2e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_compiled_rounds_alike() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(40, 50), torch.randn(33, 7), torch.randn(50), torch.randn(0, 50)]
    results = []
    for compiled in (False, True):
        weights = [tensor.bfloat16() for tensor in tensors]
        tested = optimizer(*weights, weight_decay=0.1, compiled=compiled)
        for step in range(3):
            for weight, tensor in zip(weights, tensors, strict=True):
                weight.grad = (tensor * (step + 1)).bfloat16()
            tested.param_groups[0]["lr"] = 1e-3 * (step + 1)
            tested.step()
        results.append([*weights, *(tested.state[w]["exp_avg_sq"] for w in weights)])
    for eager, compiled_ in zip(*results, strict=True):
        assert torch.equal(eager, compiled_)


# The modes


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_in_which_format(new_backend: NewBackend, mode: str) -> None:
    backend = new(new_backend, mode)
    backend.forward_backward(micro_batches(batch(), 2), LABELS)
    gradients = {p.grad.dtype for p in backend.model.parameters() if p.grad is not None}
    bytes_ = sum(
        local_part(t).nbytes
        for p in backend.model.parameters()
        for t in (p, p.grad)
        if t is not None
    )
    backend.optimizer_step(1e-3)
    moments = [
        local_part(value)
        for state in backend.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    bytes_ += sum(moment.nbytes for moment in moments)
    dtype = torch.bfloat16 if mode in PURE else torch.float32
    assert {p.dtype for p in backend.model.parameters()} == {dtype}
    assert gradients == {m.dtype for m in moments} == {dtype}
    count = sum(p.numel() for p in backend.model.parameters())
    assert bytes_ == count * (8 if mode in PURE else 16)
    assert {b.dtype for b in backend.model.buffers()} == {torch.float32}, "rotary table"


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_trains(new_backend: NewBackend, mode: str) -> None:
    figures = train(new(new_backend, mode), 12)
    losses, norms = figures[::3], figures[2::3]
    assert losses[-1] < losses[0] - 0.5
    assert all(a != b for a, b in pairwise(norms))


def test_stochastic_rounding_resumes_exactly(new_backend: NewBackend, tmp_path: Path) -> None:
    backend = new(new_backend, "bf16_sr")
    train(backend, 3)
    backend.save_shards(tmp_path).finish()
    expected = train(backend, 3, first=3)
    resumed = new(new_backend, "bf16_sr")
    resumed.load_shards(tmp_path)
    torch.manual_seed(99)  # nor does it draw from torch's own generator
    assert train(resumed, 3, first=3) == expected


@pytest.mark.parametrize(
    ("saved", "resumed"),
    sample(
        2,
        [("bf16_sr", "fp32"), ("fp32", "bf16_sr"), ("fp32", "bf16_mixed"), ("bf16_sr", "bf16")],
        arguments=2,
    ),
)
def test_precision_may_change_at_a_resume(
    new_backend: NewBackend, tmp_path: Path, saved: str, resumed: str
) -> None:
    backend = new(new_backend, saved)
    train(backend, 3)
    backend.save_shards(tmp_path).finish()
    before = {n: local_part(p).float().clone() for n, p in backend.model.named_parameters()}
    expected = train(backend, 3, first=3)
    second = new(new_backend, resumed)
    second.load_shards(tmp_path)
    dtype = torch.bfloat16 if resumed in PURE else torch.float32
    for name, parameter in second.model.named_parameters():
        state = second.optimizer.state[parameter]
        assert parameter.dtype == state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype
        assert state["step"] == 3
        assert torch.equal(local_part(parameter), before[name].to(dtype)), name
    assert train(second, 3, first=3) == pytest.approx(expected, rel=2e-2)


# Several workers


def digests(backend: NativeBackend) -> dict[str, str]:
    """Of the parameters that are not sharded over tensor-parallel workers."""
    return {
        name: hashlib.sha256(local_part(p).view(torch.int16).numpy().tobytes()).hexdigest()
        for name, p in backend.model.named_parameters()
        if not isinstance(p, DTensor) or all(x.is_replicate() for x in p.placements[1:])
    }


def updated(placement: Placement | None) -> list[Tensor]:
    """A matrix and a vector after three updates, sharded so over two workers."""
    torch.manual_seed(0)
    weights = []
    for shape in ((50, 30), (50,)):
        pair = [*torch.randn(2, *shape).bfloat16()]
        if placement is not None:
            places = [Shard(0) if len(shape) == 1 and placement == Shard(1) else placement]
            mesh = init_device_mesh("cpu", (2,))
            pair = [distribute_tensor(t, mesh, places, src_data_rank=None) for t in pair]
        weights.append(torch.nn.Parameter(pair[0]))
        weights[-1].grad = pair[1]
    tested = optimizer(*weights, seed=1, lr=1e-2)
    for _ in range(3):
        tested.step()
    return [whole(w) for w in weights]


def rounds_alike(backend: NativeBackend) -> dict[str, str]:
    for placement in (Replicate(), Shard(0), Shard(1)):
        for a, b in zip(updated(placement), updated(None), strict=True):
            assert torch.equal(a, b), placement
    return digests(backend)


@pytest.mark.parametrize(
    ("mesh", "copied"),
    [
        (("neox", 2, 1), ("layers.0.attention_norm.weight", "layers.1.mlp.down.bias")),
        (("gpt3", 1, 2), ("embed.weight",)),
    ],
)
def test_copies_stay_equal(
    pool: MeshPool, mesh: tuple[str, int, int], copied: tuple[str, ...]
) -> None:
    config = small_run(*mesh, 1, "train.micro_batch=4", "train.precision=bf16_sr")
    first, second = (o.after for o in pool.run(Case(config, last=5, after=rounds_alike)))
    common = first.keys() & second.keys()
    assert common >= set(copied)
    assert [name for name in sorted(common) if first[name] != second[name]] == []


EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "slurmllm_example"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    source = tmp_path_factory.mktemp("source") / "slurmllm_example"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)  # pip may write into it
    subprocess.run(
        [*pip, "--no-index", "--target", str(target), str(source)], check=True, timeout=600
    )
    return target


def test_a_run_trains_with_both_parts(installed: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path)
    settings = (
        "cluster.devices_per_node=2",
        "train.steps=8",
        "optim.decay_steps=8",
        *("optim.name=sgd", "optim.lr=0.1", "optim.settings.momentum=0.8"),
        "checkpoint.every_steps=4",
        "hooks.layer_norms.every=2",
        "optim.warmup_steps=2",
    )
    path = {"PYTHONPATH": str(installed)}
    whole = Gang(make_run(tmp_path / "whole", data, *settings), 2, env=path).finish()
    run = make_run(tmp_path / "run", data, *settings, "train.steps=4")
    Gang(run, 2, env=path).finish()
    run.config.write_text(whole.config.read_text())
    Gang(run, 2, attempt=1, env=path).finish()
    assert curve(run, 0, 1) == curve(whole), "bit-identical"

    written = [
        json.loads(line) for line in whole.hook_rows("layer_norms", 0).read_text().splitlines()
    ]
    assert [row.pop("step") for row in written] == [2, 4, 6, 8]
    assert list(written[0]) == ["layer_norm/0", "layer_norm/1", "layer_norm/rest"]
    total = sum(norm**2 for norm in written[-1].values()) ** 0.5
    assert total == pytest.approx(curve(whole)[8][2], rel=1e-6)
    assert b"layer_norm/rest" in next(whole.tensorboard.glob("events*")).read_bytes()

    # The plugin's state does not keep weights from being exported.
    checkpoint = str(whole.checkpoint(8))
    assert call("checkpoint", "export", checkpoint, "--out", tmp_path / "hub").exit_code == 0

    # A resume with another optimizer starts from no checkpoint of this one.
    adamw = ("optim.name=adamw", "optim.settings={}")
    run.config.write_text(small_config(*settings, *adamw, data=data).to_yaml())
    gang = Gang(run, 2, attempt=2, env=path)
    assert gang.wait() == [2, 2]
    assert "optim.name: the checkpoint has 'sgd', the run 'adamw'" in gang.output()
    # Without the package, before the first step.
    run.config.write_text(whole.config.read_text())
    gang = Gang(run, 2, attempt=3)
    assert gang.wait() == [2, 2]
    assert "hooks.layer_norms: 'layer_norms' is unknown: no installed package" in gang.output()
