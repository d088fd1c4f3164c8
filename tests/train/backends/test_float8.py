"""Products in fp8: torchao's bits, any mesh, exact resumes, and who is refused."""

import importlib.util
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amounts import sample
from mesh_pool import Case, MeshPool, Outcome, deviation, small_run
from torch import Tensor, nn
from torch.nn import functional as F

from slurmllm.core.config.resolve import resolve
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.backends.native import float8
from slurmllm.train.backends.native.device import Device
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.checkpoint.formats.huggingface import tensor_mappings
from train.backends.conftest import LABELS, NewBackend, batch, micro_batches, train

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.numerics,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo's own
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # Inductor's own
]

RECIPES = ("tensorwise", "rowwise")
FP8 = "train.precision=fp8_mixed"
# Roundings to fp8 (2^-4 of a value, averaged over the terms of a product) that fall differently
# move the loss of a few steps by 1e-4 and its gradient by 3e-3; formats that are mixed up (fp8
# gradients of the wrong range, a scale not divided out) by more than 1e-2.
STEPS = 4  # such differences grow with the steps
NOISE = 1e-3, 1e-2, 1e-4  # loss, gradient norm, parameter norm


def within(ours: list[Outcome], reference: list[Outcome], limits: tuple[float, ...]) -> bool:
    return all(d <= limit for d, limit in zip(deviation(ours, reference), limits, strict=True))


def recipe(name: str) -> tuple[str, str]:
    return FP8, f"train.fp8_recipe={name}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_product_has_torchao_s_bits(new_backend: NewBackend, name: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    backend = new_backend(*recipe(name))
    block = backend.chunks[0].blocks()[0]
    assert backend.weights is not None
    with backend.weights.whole():
        for module in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down):
            ours: Any = deepcopy(module)
            plain = nn.Linear(ours.in_features, ours.out_features, dtype=torch.bfloat16)
            plain.load_state_dict(ours.state_dict())
            config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
            reference = convert_to_float8_training(deepcopy(plain), config=config)
            inputs = torch.randn(2, 32, ours.in_features, dtype=torch.bfloat16)
            results = []
            for layer in (ours, reference, plain):
                x = inputs.clone().requires_grad_()
                out = layer(x)
                out.backward(torch.ones_like(out) * torch.arange(out.shape[-1]).bfloat16())
                results.append([out, x.grad, layer.weight.grad, layer.bias.grad])
            for a, b, exact in zip(*results, strict=True):
                assert torch.equal(a, b)
                assert (a - exact).norm() < 0.1 * exact.norm()
            assert not torch.equal(results[0][0], results[2][0]), "or nothing is rounded"


def kinds(backend: NativeBackend) -> dict[str, Any]:
    """What multiplies each matrix, and whether FSDP gathers it in fp8."""
    found = {}
    for name, module in backend.model.named_modules():
        if isinstance(module, nn.Linear):
            weight: Any = module.weight
            wrapped = hasattr(getattr(weight, "_local_tensor", None), "_precomputed_scale")
            found[f"{name}.weight"] = type(module).__name__, wrapped
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_only_the_blocks_multiply_in_fp8(pool: MeshPool, name: str) -> None:
    (plain,) = pool.run(Case(small_run("llama"), last=0, after=kinds))
    outcomes = pool.run(Case(small_run("llama", 1, 1, 2, *recipe(name)), last=0, after=kinds))
    assert plain.after.keys() == outcomes[0].after.keys(), "names of parameters stay"
    for matrix, kind in outcomes[0].after.items():
        in_block = matrix.startswith("layers.")
        gathered = in_block and name == "tensorwise"
        assert kind == ("Float8Linear" if in_block else "Linear", gathered), matrix


def shard_one_worker() -> None:
    from slurmllm.train.backends.native import runtime

    # In a process of the pool, which nothing else uses.
    runtime.fsdp_disabled = lambda config, mesh: False  # type: ignore[attr-defined]


SHARDED, STAGED = (1, 1, 2, "parallel.zero=3"), (1, 2, 2)
MESHES = sample(
    2,
    [
        ("tensorwise", SHARDED, 1e-6),  # but for the order of sums
        ("rowwise", (2, 1, 2, "parallel.sequence=true"), NOISE),
        ("tensorwise", (2, 1, 1), NOISE),
        ("tensorwise", (2, 1, 1, "train.compile=true"), NOISE),
        ("rowwise", SHARDED, 1e-6),
        ("tensorwise", STAGED, 1e-6),
        ("tensorwise", (1, 1, 2, "parallel.shard_nodes=1"), 1e-6),
    ],
    arguments=3,
)


@pytest.fixture(scope="module")
def sharded(pool: MeshPool) -> dict[str, list[Outcome]]:
    """Recipe → STEPS steps of one worker with FSDP."""
    cases = {
        name: Case(small_run("llama", 1, 1, 1, *recipe(name)), last=STEPS, prepare=shard_one_worker)
        for name in RECIPES
    }
    return {name: pool.run(case) for name, case in cases.items()}


@pytest.mark.parametrize(("name", "mesh", "limit"), MESHES)
def test_meshes(
    pool: MeshPool,
    sharded: dict[str, list[Outcome]],
    name: str,
    mesh: tuple[Any, ...],
    limit: float | tuple[float, ...],
) -> None:
    config = small_run("llama", *mesh[:3], *recipe(name), *mesh[3:])
    outcomes = pool.run(Case(config, last=STEPS, nodes=2 if "shard_nodes" in str(mesh[-1]) else 1))
    assert within(outcomes, sharded[name], limit if isinstance(limit, tuple) else (limit,) * 3)


@pytest.mark.parametrize("name", RECIPES)
def test_one_without_fsdp(pool: MeshPool, sharded: dict[str, list[Outcome]], name: str) -> None:
    outcomes = pool.run(Case(small_run("llama", 1, 1, 1, *recipe(name)), last=STEPS))
    # tensorwise: FSDP converts weights from fp32 to fp8, a single worker from bf16.
    assert within(outcomes, sharded[name], (1e-7,) * 3 if name == "rowwise" else NOISE)


def test_matrices_that_do_not_divide_are_gathered_in_bf16(pool: MeshPool) -> None:
    # Of 64 and 128 rows, three workers have unequal parts.
    settings = FP8, "train.global_batch=6", "train.micro_batch=1"
    one = pool.run(Case(small_run("llama", 1, 1, 1, *settings), last=1))
    outcomes = pool.run(Case(small_run("llama", 1, 1, 3, *settings), last=1, after=kinds))
    assert within(outcomes, one, NOISE)
    assert not any(gathered for _, gathered in outcomes[0].after.values())


@pytest.mark.parametrize(
    "setting",
    [
        "train.activation_checkpointing=full",
        pytest.param("train.compile=true", marks=pytest.mark.long),
    ],
)
def test_what_saves_memory_or_time(new_backend: NewBackend, setting: str) -> None:
    plain, changed = train(new_backend(FP8), 3), train(new_backend(FP8, setting), 3)
    assert changed == pytest.approx(plain, rel=0 if "full" in setting else 2e-2)


@pytest.mark.parametrize(
    ("name", "workers"),
    sample(1, [("tensorwise", 2), ("rowwise", 2), ("tensorwise", 1)], arguments=2),
)
def test_a_resume_is_bit_identical(pool: MeshPool, tmp_path: Path, name: str, workers: int) -> None:
    config = small_run("neox", 1, 1, workers, *recipe(name))
    whole = pool.run(Case(config, last=4, save=tmp_path / "shards", save_at=2))
    later = pool.run(Case(config, first=2, last=4, load=tmp_path / "shards"))
    assert later[0].rows == whole[0].rows[2:]
    # The format is that of other precisions, and any number of workers reads it.
    other = small_run("neox", 1, 1, 1, "train.precision=bf16_mixed")
    moved = pool.run(Case(other, first=2, last=4, load=tmp_path / "shards"))
    assert within(moved, whole, NOISE)


@pytest.mark.parametrize("name", RECIPES)
def test_three_steps_are_those_of_a_plain_loop(new_backend: NewBackend, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    llama = ("model.family=llama", "model.rotary_pct=1.0", "optim.grad_clip=0")
    backend = new_backend(*recipe(name), *llama, "train.micro_batch=8")
    c = backend.config.recipe.model
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.padded_vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.ffn_hidden_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.kv_heads,
            rms_norm_eps=c.norm_eps,
            rope_theta=c.rotary_base,
            tie_word_embeddings=False,
        )
    )
    model.load_state_dict(split_matrices(backend))
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(torch.bfloat16)
    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    convert_to_float8_training(model.model.layers, config=config)
    optim = backend.config.recipe.optim
    decays = [optim.weight_decay if p.ndim > 1 else 0.0 for p in masters]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(masters, decays, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=optim.betas, eps=optim.eps)
    rows = []
    for step in range(3):
        tokens = torch.from_numpy(batch(seed=step))
        logits = model(tokens[:, :-1]).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for master, used in zip(masters, model.parameters(), strict=True):
                master.grad = used.grad.float()
            norm = torch.nn.utils.get_total_norm([p.grad for p in masters])
            optimizer.step()
            for master, used in zip(masters, model.parameters(), strict=True):
                used.copy_(master)
        rows += [loss.item(), norm.item()]
    ours = []
    for step in range(3):
        mean = backend.forward_backward(micro_batches(batch(seed=step), 8), LABELS)
        ours += [float(mean), float(backend.optimizer_step(1e-3))]
    # Theirs has scales of q, k, v, gate and up, ours of qkv and gate_up.
    assert ours[::2] == pytest.approx(rows[::2], rel=2e-4)
    assert ours[1::2] == pytest.approx(rows[1::2], rel=1e-2)


def split_matrices(backend: NativeBackend) -> dict[str, Tensor]:
    """A decoder's weights under transformers' names."""
    model = backend.config.recipe.model
    ours = {name: p.detach() for name, p in backend.model.named_parameters()}
    return {
        name: part.clone()
        for m in tensor_mappings(model)
        for name, part in zip(m.theirs, m.layout.split(model, ours[m.ours]), strict=True)
    }


# Who is refused


def faults(*overrides: str, cluster: str = "local") -> list[str]:
    config = resolve("tiny_neox", cluster, [FP8, "train.micro_batch=2", *overrides])
    return [f for f in load_environment(config.backend).unsupported(config) if "fp8" in f]


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ((), None),
        (("model.ffn_hidden_size=770",), "model.ffn_hidden_size: 770: .* of 770,.* 16.*784"),
        (("model.hidden_size=200", "model.num_heads=5"), "model.hidden_size: 200: .*make it 240,"),
        (("parallel.tensor=2", "model.hidden_size=208", "model.num_heads=2"), "of 104,.* 224,"),
        (("model.family=llama", "model.rotary_pct=1", "model.head_dim=20"), "head_dim: 20: .* 32,"),
        (("model.num_heads=8",), None),
        (
            ("parallel.tensor=2", "model.ffn_hidden_size=784"),
            "model.ffn_hidden_size: 784: .* of 392,.*make it 800,",
        ),
        (("model.seq_len=100",), "model.seq_len: 100: .* of 200,.*112,"),
        (("model.seq_len=100", "train.micro_batch=4"), None),
        (("model.seq_len=100", "train.micro_batch=auto"), "model.seq_len: 100: .* of 100,"),
        (("backend=nxd", "parallel.zero=1"), "neuronx-distributed has no fp8"),
    ],
    ids=str,
)
def test_sizes_and_backends(overrides: tuple[str, ...], fault: str | None) -> None:
    found = faults(*overrides)
    if fault is None:
        assert not found
    else:
        (line,) = found
        assert re.search(fault, line), line
        assert "train.precision=bf16_mixed" in line


def test_devices_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    for cluster, fault in (("p5", None), ("a100_ib", "a100_ib has no hardware.fp8_tflops")):
        found = faults(cluster=cluster)
        assert not found if fault is None else fault in found[0]
    assert not faults("cluster.hardware.fp8_tflops=660", cluster="a100_ib"), "a card of one's own"
    assert "neuron devices" in faults("backend=native", cluster="trn2")[0]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name)
    )
    assert "pip install torchao" in faults()[0]


@pytest.mark.parametrize(
    ("capability", "hip", "refused"),
    [
        ((8, 0), None, RECIPES),
        ((8, 9), None, ("rowwise",)),
        ((9, 0), None, ()),
        ((12, 0), None, ()),
        ((9, 4), "6.2", RECIPES),
    ],
)
def test_gpus_without_fp8(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    hip: str | None,
    refused: tuple[str, ...],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    gpu: Any = SimpleNamespace(torch=torch.device("cuda", 0))
    for name in RECIPES:
        train_config = resolve("tiny_neox", "local", recipe(name)).recipe.train
        fault = float8.device_fault(train_config, gpu)
        assert (fault is not None) == (name in refused)
        assert fault is None or "NVIDIA X" in fault
        assert float8.device_fault(train_config, Device()) is None
