"""`optim.name: muon` against torch.optim.Muon, and every mesh against one process.

For the same gradients the bits are equal. Gradients of two meshes differ by the order of fp32
sums; Newton-Schulz in bf16 rounds some of them to another number, which norms of gradients show.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from amounts import sample
from mesh_pool import FAMILIES, Case, MeshPool, deviation
from mesh_pool import small_run as small
from torch import Tensor, nn
from torch.nn import functional as F

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError
from slurmllm.plan.memory import memory_moments
from slurmllm.plan.parameters import block_shapes, muon_shapes, newton_schulz_product
from slurmllm.plan.step import step_time
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.checkpoint.formats.huggingface import tensor_mappings
from slurmllm.train.checkpoint.formats.weights import open_training
from slurmllm.train.model.decoder import Decoder, build_model
from slurmllm.train.model.init import initialize, local_part, local_region, normal
from train.backends.conftest import LABELS, NewBackend, batch, micro_batches, whole
from train.gang import Gang, curve, make_data, make_run, small_config

pytestmark = pytest.mark.numerics

MUON = "optim.name=muon"
FEW, SEQUENCE, ZERO3 = "train.micro_batch=4", "parallel.sequence=true", "parallel.zero=3"
# Shards of unequal sizes, some of them without rows; blocks of two gates.
ODD = ("model.ffn_hidden_size=126", "model.num_kv_heads=1")
STEPS = 4
# Of the loss, and of the gradient's norm and the weights' after some steps.
LOSS, NORMS = 1e-5, 2e-4


def mesh(family: str, tensor: int, pipeline: int, data: int, *overrides: str, **case: Any) -> Case:
    """A case; with `parallel.shard_nodes`, on nodes of two workers."""
    workers = tensor * pipeline * data
    nodes = workers // 2 if any("shard_nodes" in text for text in overrides) else 1
    per_node = f"cluster.devices_per_node={workers // nodes}"
    return Case(small(family, tensor, pipeline, data, MUON, per_node, *overrides), nodes, **case)


MESHES: list[Any] = [
    ("llama", 1, 1, 2),
    ("llama", 1, 1, 8, "parallel.shard_nodes=1", "train.micro_batch=1"),
    ("llama", 2, 1, 2, FEW, SEQUENCE),
    ("neox", 1, 2, 2, FEW),
    ("llama", 1, 1, 4, ZERO3, *ODD),
    ("qwen3", 2, 2, 1, FEW),
    ("gpt3", 2, 1, 1, FEW),
    ("llama3", 1, 1, 3, "train.global_batch=6", *ODD),
    ("gpt3", 1, 2, 4, "parallel.shard_nodes=1", "train.micro_batch=1"),
]


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith("layers.") and parameter.ndim == 2
    }


def state(backend: NativeBackend) -> dict[str, np.ndarray]:
    """Weight and momentum of each matrix, whole."""
    return {
        f"{name} {kind}": whole(tensor).detach().float().numpy().copy()
        for name, parameter in matrices(backend.model).items()
        for kind, tensor in (("weight", parameter), *backend.optimizer.state[parameter].items())
    }


def gradient(name: str, parameter: Tensor, step: int, region: Sequence[slice]) -> Tensor:
    """The same numbers on every mesh."""
    if parameter.ndim == 1:
        return torch.zeros([bounds.stop - bounds.start for bounds in region])
    return normal(parameter.shape, 0.01, step, name, region)


def step_with_equal_gradients(backend: NativeBackend) -> tuple[Any, list[tuple[int, int]]]:
    """Weights and momenta after three steps, and the matrices that this worker orthogonalized."""
    shapes: list[tuple[int, int]] = []
    optimizer: Any = backend.optimizer
    original = optimizer._newton_schulz

    def counted(matrix: Tensor, *options: Any) -> Tensor:
        shapes.append((matrix.shape[0], matrix.shape[1]))
        result: Tensor = original(matrix, *options)
        return result

    optimizer._newton_schulz = counted
    for step in range(3):
        for name, parameter in backend.model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            values = gradient(name, parameter, step, local_region(parameter))
            local_part(parameter.grad).copy_(values)
        for group in backend.optimizer.param_groups:
            group["lr"] = 1e-2
        backend.optimizer.step()
    return state(backend), shapes[: len(shapes) // 3]


def parts(name: str, tensor: Tensor, model: Any) -> list[Tensor]:
    """The matrices of a parameter of a layer, as views: by the docstrings of the decoder."""
    if name.endswith("qkv.weight"):
        group = model.num_heads // model.kv_heads
        heads = tensor.unflatten(0, (model.kv_heads, group + 2, model.head_width))
        return [heads[:, :group], heads[:, group], heads[:, group + 1]]
    if name.endswith("gate_up.weight"):
        blocks = tensor.unflatten(0, (-1, 2, model.gate_block))
        return [blocks[:, 0], blocks[:, 1]]
    return [tensor]


def steps_of_torch(config: RunConfig) -> dict[str, np.ndarray]:
    """The same by torch.optim.Muon, on each of queries, keys, values, gate and up."""
    model = build_model(config.recipe.model)
    initialize(model, config.recipe.model, config.recipe.train.seed)
    named = matrices(model)
    views = [
        view
        for name, parameter in named.items()
        for view in parts(name, parameter.detach(), model.config)
    ]
    flat = [view.reshape(-1, view.shape[-1]).clone() for view in views]
    optim = config.recipe.optim
    theirs = torch.optim.Muon(flat, 1e-2, optim.weight_decay, 0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        gradients = (
            part
            for name, parameter in named.items()
            for part in parts(
                name, gradient(name, parameter, step, local_region(parameter)), model.config
            )
        )
        for matrix, values in zip(flat, gradients, strict=True):
            matrix.grad = values.reshape(matrix.shape)
        theirs.step()
    for view, matrix in zip(views, flat, strict=True):
        view.copy_(matrix.view(view.shape))
    return {f"{name} weight": parameter.detach().numpy() for name, parameter in named.items()}


@pytest.mark.parametrize("on", sample(3, MESHES), ids=str)
def test_torch_s_bits_and_one_owner_for_each_matrix(pool: MeshPool, on: tuple[Any, ...]) -> None:
    case = mesh(*on, last=0, after=step_with_equal_gradients)
    outcomes = pool.run(case)
    settings = [part for part in on[4:] if part in ODD]
    expected = steps_of_torch(small(on[0], 1, 1, 1, MUON, *settings))
    compared = set()
    for outcome in outcomes:
        for name, values in outcome.after[0].items():
            if name in expected:
                np.testing.assert_array_equal(values, expected[name], name)
                compared.add(name)
    assert compared == expected.keys()
    model = case.config.recipe.model
    orthogonalized = [shape for outcome in outcomes for shape in outcome.after[1]]
    assert sorted(orthogonalized) == sorted(muon_shapes(model) * model.num_layers)
    flops = [
        sum(newton_schulz_product(shape).flops for shape in outcome.after[1])
        for outcome in outcomes
    ]
    each = case.mesh.stage_workers
    largest = max(newton_schulz_product(shape).flops for shape in muon_shapes(model))
    for first in range(0, len(flops), each):
        stage = flops[first : first + each]
        assert max(stage) <= sum(stage) / each + 1.01 * largest, "shared out evenly"


@pytest.mark.parametrize("on", sample(2, MESHES), ids=str)
def test_same_training_on_every_mesh(pool: MeshPool, on: tuple[Any, ...]) -> None:
    shape = [part for part in on[4:] if part in ODD or "global_batch" in part]
    (expected,) = pool.run(mesh(on[0], 1, 1, 1, *shape, last=STEPS, before=state, after=state))
    outcomes = pool.run(mesh(*on, last=STEPS, after=state))
    loss, gradient_norm, parameter_norm = deviation(outcomes, [expected])
    assert loss < LOSS
    assert max(gradient_norm, parameter_norm) < NORMS
    for outcome in outcomes:
        assert outcome.rows == outcomes[0].rows
        for name, values in outcome.after.items():
            apart = np.linalg.norm(values - expected.after[name])
            # Directions whose singular values are below bf16's spacing are those of rounding.
            moved = np.linalg.norm(expected.after[name] - expected.before.get(name, 0))
            assert apart < (0.1 if name.endswith("weight") else 1e-3) * moved, name
    assert {name for o in outcomes for name in o.after} == expected.after.keys()


def text(step: int) -> np.ndarray:
    """Sequences that are never the same, of which the frequencies and bigrams can be learnt."""
    random = np.random.default_rng(step)
    drawn = np.minimum(random.zipf(1.3, (8, 33)), 250) - 1
    tokens: np.ndarray = drawn + np.roll(drawn, 1, axis=1) % 2 * 250
    return tokens


def plain_loop(model: nn.Module, config: RunConfig, steps: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of a loop over transformers' model with torch's optimizers."""
    optim = config.recipe.optim
    inside = {n: p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2}
    others = [p for n, p in model.named_parameters() if n not in inside]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    assert optim.adamw_lr is not None
    optimizers = [
        torch.optim.Muon(
            inside.values(), optim.lr, optim.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, optim.adamw_lr, optim.betas, optim.eps),
    ]
    rows = []
    for step in range(steps):
        tokens = torch.from_numpy(text(step))
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    return rows


@pytest.mark.parametrize("family", sample(1, ["llama", "qwen3"]))
def test_a_plain_loop_over_transformers(new_backend: NewBackend, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = (f"model.family={family}", "model.rotary_pct=1.0", "model.num_kv_heads=2")
    rates = ("optim.lr=2.5e-4", "optim.adamw_lr=1e-3", "optim.weight_decay=0.1")
    backend = new_backend(MUON, *shape, *rates)
    model = backend.config.recipe.model
    kind = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    reference: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_width,
            intermediate_size=model.ffn_hidden_size,
            rms_norm_eps=model.norm_eps,
            max_position_embeddings=model.seq_len,
            tie_word_embeddings=model.tied_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
        )
    )
    theirs = dict(reference.named_parameters())
    for mapping in tensor_mappings(model):
        ours = backend.model.get_parameter(mapping.ours).detach()
        for name, values in zip(mapping.theirs, mapping.layout.split(model, ours), strict=True):
            theirs[name].data.copy_(values)
    expected = np.array(plain_loop(reference, backend.config, 50))
    rows = []
    for step in range(50):
        loss = backend.forward_backward(micro_batches(text(step), 4), LABELS)
        rows.append((float(loss), float(backend.optimizer_step(2.5e-4))))
    apart = np.abs(np.array(rows) / expected - 1).max(axis=0)
    assert apart[0] < LOSS, apart
    assert expected[-1, 0] < expected[0, 0] - 1, "it learns"


@pytest.mark.parametrize("on", sample(1, [("llama", 2, 2, 1, FEW), ("gpt3", 1, 1, 4, ZERO3)]))
def test_resumes_bit_for_bit_and_on_another_mesh(
    pool: MeshPool, tmp_path: Path, on: tuple[Any, ...]
) -> None:
    half = STEPS // 2
    expected = pool.run(mesh(*on, last=STEPS, save=tmp_path / "a", save_at=half, between=state))
    saved = [outcome.between[half - 1] for outcome in expected]
    again = pool.run(mesh(*on, first=half, last=STEPS, load=tmp_path / "a"))
    assert again[0].rows == expected[0].rows[half:]
    other = (on[0], 1, 1, 8, "parallel.shard_nodes=2", "train.micro_batch=1")
    folders: Any = {"load": tmp_path / "a", "save": tmp_path / "b"}
    loaded = pool.run(mesh(*other, first=half, last=half, before=state, **folders))
    for part in saved:
        for name, values in part.items():
            np.testing.assert_array_equal(loaded[0].before[name], values, name)
    back = pool.run(mesh(*on, first=half, last=STEPS, load=tmp_path / "b"))
    assert back[0].rows == expected[0].rows[half:]
    # By name: one moment of each matrix, AdamW's two of all else.
    names: dict[str, set[str]] = {}
    for kind, name in open_training(tmp_path / "b", small(on[0]).recipe.model).moments:
        names.setdefault(kind, set()).add(name)
    assert names["momentum_buffer"] == {name.split()[0] for part in saved for name in part}
    assert names["exp_avg"] == names["exp_avg_sq"] >= {"embed.weight", "final_norm.weight"}
    assert not names["exp_avg"] & names["momentum_buffer"]


def test_a_run_resumes_and_keeps_its_optimizer(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    settings = ["cluster.devices_per_node=2", "train.steps=8", "optim.decay_steps=8", MUON]
    settings += ["optim.adamw_lr=3e-3", "checkpoint.every_steps=4"]
    whole_run = Gang(make_run(tmp_path / "whole", data, *settings), 2).finish()
    run = make_run(tmp_path / "run", data, *settings, "train.steps=4")
    Gang(run, 2).finish()
    run.config.write_text(whole_run.config.read_text())
    Gang(run, 2, attempt=1).finish()
    assert curve(run, 0, 1) == curve(whole_run), "bit-identical"
    run.config.write_text(small_config(*settings[:3], data=data).to_yaml())
    gang = Gang(run, 2, attempt=2)
    assert gang.wait() == [2, 2]
    assert "optim.name: the checkpoint has 'muon', the run 'adamw'" in gang.output()


@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed", "bf16"])
def test_each_precision(new_backend: NewBackend, mode: str) -> None:
    backend = new_backend(MUON, f"train.precision={mode}", "optim.adamw_lr=4e-3")
    losses = []
    for step in range(12):
        loss = backend.forward_backward(micro_batches(batch(seed=step % 2), 4), LABELS)
        backend.optimizer_step(2e-3)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.3
    rates = {group["lr"] for group in backend.optimizer.param_groups}
    optim = backend.config.recipe.optim
    assert rates == {2e-3, 2e-3 * 4e-3 / optim.lr}
    model = backend.model
    assert isinstance(model, Decoder)
    held = sum(
        tensor.nbytes
        for moments in backend.optimizer.state.values()
        for name, tensor in moments.items()
        if name != "step"
    )
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    numbers = sum(
        (1 if name in matrices(model) else 2) * p.numel() for name, p in model.named_parameters()
    )
    assert held == numbers * dtype.itemsize
    assert held == memory_moments(backend.config, backend.mesh, 0)[0]["optimizer"], "as planned"


def test_the_plan_counts_the_iterations() -> None:
    def optimizer_s(*overrides: str) -> float:
        config = small("llama", 1, 1, 4, *overrides)
        return step_time(config, Case(config).mesh).optimizer

    shape = ("model.hidden_size=512", "model.ffn_hidden_size=2048")
    few, many = (optimizer_s(MUON, f"optim.ns_steps={steps}", *shape) for steps in (5, 10))
    config = small("llama", 1, 1, 4, *shape)
    hardware = config.cluster.hardware
    assert hardware is not None
    model = config.recipe.model
    shapes = muon_shapes(model)
    flops = model.num_layers * sum(newton_schulz_product(shape).flops for shape in shapes)
    assert many - few > 5 * flops / 4 / (hardware.bf16_tflops * 1e12)
    assert few > optimizer_s(*shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_knows_the_matrices_of_every_family(family: str) -> None:
    model = small(family).recipe.model
    blocks = [math.prod(shape) for shape in block_shapes(model).values() if len(shape) > 1]
    assert sum(map(math.prod, muon_shapes(model))) == sum(blocks)


def test_what_is_refused() -> None:
    for settings, message in (
        (("optim.momentum=0.9",), "optim.momentum: 0.9 is for optim.name muon, and optim.name is"),
        (("optim.nesterov=false",), "optim.nesterov: false is for optim.name muon"),
        (("optim.adamw_lr=1e-3",), "or set optim.name=muon"),
        ((MUON, "optim.settings.adamw_lr=1e-3"), "optim.name is muon; set optim.name to one, or"),
        ((MUON, "optim.ns_steps=0"), "optim.ns_steps"),
        ((MUON, "optim.momentum=1"), "optim.momentum"),
    ):
        with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
            small("llama", 1, 1, 1, *settings)
    muon = small("llama", 1, 1, 1, MUON, "train.precision=bf16_sr")
    assert "bf16_sr rounds stochastically inside AdamW, and optim.name is muon" in "".join(
        load_environment("native").unsupported(muon)
    )
    assert "optim.name: muon needs the native backend" in "".join(
        load_environment("nxd").unsupported(muon)
    )
