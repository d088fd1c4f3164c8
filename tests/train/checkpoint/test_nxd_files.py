"""Reading what either backend writes, on any mesh and on a machine without NxD."""

import random
from pathlib import Path

import pytest
import torch
from amounts import sample
from torch import Tensor

from slurmllm.core.config.load import load
from slurmllm.core.errors import StorageError
from slurmllm.plan.parameters import parameter_shapes
from slurmllm.train.checkpoint.formats.exporting import plan_export, run_export
from slurmllm.train.checkpoint.formats.model_folders import TokenizerFiles
from slurmllm.train.checkpoint.formats.weights import TrainingFiles, open_training, weight_reader
from slurmllm.train.checkpoint.state import TrainState, fingerprint, read_origin
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import fill
from slurmllm.train.model.regions import Region
from train.checkpoint.nxd_folders import Layout, Whole, random_whole, write_native, write_nxd
from train.checkpoint.test_weights import config, write
from train.gang import Gang, make_data, make_run

LAYOUTS = {
    "zero pads": ("neox", Layout(2, 2, 3)),
    "kv heads on four": ("llama", Layout(8, 2, 1, zero=False)),
    "norms of queries and keys": ("qwen3", Layout(4, 2, 3)),
    "tied over stages": ("gpt3", Layout(2, 4, 2)),
    "master weights": ("llama", Layout(4, 2, 5, dtype="bfloat16")),
    "one worker": ("neox", Layout()),
    "kv heads on two workers each": ("llama", Layout(4, 1, 3)),
    "as many workers as kv heads": ("llama", Layout(2, 4, 2)),
    "tied": ("gpt3", Layout(4, 1, 3)),
    "tied, no zero": ("gpt3", Layout(2, 2, 1, zero=False)),
}
HALF = {"dtype": "bfloat16", "optimizer_dtype": "bfloat16"}


def some_region(shape: tuple[int, ...], dice: random.Random) -> Region:
    results = []
    for size in shape:
        start = dice.randrange(size)
        results.append(slice(start, dice.randrange(start, size) + 1))
    return tuple(results)


def assert_holds(files: TrainingFiles, whole: Whole, dtype: torch.dtype | None = None) -> None:
    """Everything, whole and in parts, bit by bit."""
    assert set(files.tensors) == set(whole.weights)
    dice = random.Random(1)
    for name, weight in whole.weights.items():
        assert files.step(name) == whole.step
        assert files.tensors[name].shape == weight.shape
        readings = [(weight, files.read(name), lambda r, n=name: files.read(n, r))]
        for kind, moments in whole.moments.items():
            values = files.read(name, kind=kind)
            part = lambda r, n=name, k=kind: files.read(n, r, k)  # noqa: E731
            readings.append((moments[name], values, part))
        for stored, values, read in readings:
            expected = stored if dtype is None else stored.to(dtype)
            assert values.dtype == expected.dtype
            assert torch.equal(values, expected), name
            for _ in range(3):
                region = some_region(tuple(expected.shape), dice)
                assert torch.equal(read(region), expected[region]), (name, region)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [*sample(3, LAYOUTS.values(), arguments=2), ("neox", 1), ("qwen3", 3)],
    ids=[*LAYOUTS, "native, one worker", "native, three workers"],
)
def test_every_value(family: str, mesh: Layout | int, tmp_path: Path) -> None:
    whole = random_whole(family)
    if isinstance(mesh, int):
        write_native(tmp_path, whole, mesh)
    else:
        write_nxd(tmp_path, whole, mesh)
    assert_holds(open_training(tmp_path, whole.model), whole)


def test_weights_without_zero_are_the_model_s(tmp_path: Path) -> None:
    # Rounded to bf16: there is nothing better in the folder.
    whole = random_whole("neox")
    write_nxd(tmp_path, whole, Layout(2, zero=False, dtype="bfloat16"))
    files = open_training(tmp_path, whole.model)
    for name, weight in whole.weights.items():
        assert torch.equal(files.read(name), weight.to(torch.bfloat16))


def test_a_model_filled_and_an_export(tmp_path: Path) -> None:
    whole = random_whole("gpt3")
    write_nxd(tmp_path / "c", whole, Layout(2, 2, 3, dtype="bfloat16"))
    model = build_model(whole.model)
    fill(model, weight_reader(tmp_path / "c", whole.model))
    rows = whole.model.vocab_size
    for name, parameter in model.named_parameters():
        # init_from takes what the vocabulary has, and no padding.
        rows_kept = parameter if name != "embed.weight" else parameter[:rows]
        assert torch.equal(rows_kept, whole.weights[name][: len(rows_kept)]), name
        assert not parameter[len(rows_kept) :].any()
    names = run_export(plan_export(tmp_path / "c", TokenizerFiles({})), tmp_path / "hub", 10**9)
    assert "model.safetensors" in names
    assert read_origin(tmp_path / "c").model == whole.model


def test_a_shorter_table_of_positions_and_more_padding(tmp_path: Path) -> None:
    whole = random_whole("gpt3")
    write_nxd(tmp_path, whole, Layout(2, 2, 1))
    model = whole.model.model_copy(update={"seq_len": 8, "vocab_pad_multiple": 64})
    files = open_training(tmp_path, model)
    shapes = parameter_shapes(model)

    def everything(name: str) -> Region:
        return tuple(slice(0, size) for size in shapes[name])

    table = files.read("positions.weight", everything("positions.weight"))
    assert torch.equal(table, whole.weights["positions.weight"][:8])
    stored = len(whole.weights["embed.weight"])
    for result, expected in (
        (files.read("embed.weight", everything("embed.weight")), whole.weights),
        (
            files.read("embed.weight", everything("embed.weight"), "exp_avg"),
            whole.moments["exp_avg"],
        ),
    ):
        assert torch.equal(result[:stored], expected["embed.weight"])
        assert len(result) > stored
        assert not result[stored:].any()


def test_damage_is_named(tmp_path: Path) -> None:
    whole = random_whole("neox")
    write_nxd(tmp_path, whole, Layout(2, 2, 2, dtype="bfloat16"))
    name = "layers.3.mlp.up.weight"
    shard = tmp_path / "nxd/optim/dp_rank_01_tp_rank_01_pp_rank_01.pt"
    content = shard.read_bytes()

    def fails(match: str) -> None:
        with pytest.raises(StorageError, match=match):
            open_training(tmp_path, whole.model).read(name)

    files = open_training(tmp_path, whole.model)
    files.read(name)
    shard.write_bytes(content[:1000])  # by another machine, while a worker reads
    with pytest.raises(StorageError, match=f"{shard.name} is cut short"):
        files.read(name)
    shard.write_bytes(content[:-1000])
    fails(f"{shard.name} is damaged")
    shard.unlink()
    fails(f"{shard.name} cannot be read: No such file")
    other = shard.with_name("dp_rank_01_tp_rank_01_pp_rank_00.pt")
    held = torch.load(other)
    number = max(held["sharded_master_weights"])
    held["sharded_master_weights"] = {
        i: torch.zeros(3, 5) if i != number else t
        for i, t in held["sharded_master_weights"].items()
    }
    torch.save(held, shard)
    fails(rf"{shard.name}: sharded_master_weights.\d+ is \[3, 5\], but")
    del held["sharded_master_weights"]
    torch.save(held, shard)
    fails(rf"{shard.name} holds no sharded_master_weights.\d+; restore it")
    (tmp_path / "nxd_layout.json").write_text('{"tensor": 2}')
    fails("nxd_layout.json is damaged")


# A native worker reads an NxD checkpoint, tells what it then has, whole, and saves it. Models that
# are filled, shared out by pipeline, tensor and FSDP, are what they were.
_WORKER = """
import os, sys
from pathlib import Path
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from train.checkpoint.pretend import save
from slurmllm.train.backends.base import Worker, load_backend
from slurmllm.train.backends.native.parallel import apply_tensor_parallel
from slurmllm.train.checkpoint.formats.weights import VOCABULARY, weight_reader
from slurmllm.train.checkpoint.state import TrainState, fingerprint, read_origin
from slurmllm.core.config.load import load
from slurmllm.train.control.plane import open_control
from slurmllm.core.errors import StorageError
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import fill
from slurmllm.plan.mesh import make_mesh
from slurmllm.core.run.rundir import RunDir

def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

def check(model, config, folder):
    before = {name: local(p).clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        local(parameter).fill_(7.0)
    fill(model, weight_reader(folder, config))
    for name, parameter in model.named_parameters():
        now = local(parameter)
        kept = now != 0 if name in VOCABULARY else torch.ones_like(now, dtype=torch.bool)
        assert torch.equal(now[kept], before[name][kept]), name

run, rank = RunDir(Path(sys.argv[1])), int(os.environ["RANK"])
config = load(run.config)
worker, control = Worker(rank, 4, rank, "node"), open_control(rank, 4)
backend = load_backend("native")(config, make_mesh(config, 1), worker, control)
backend.start()
backend.build()
backend.load_shards(run.path / "nxd")
options = StateDictOptions(full_state_dict=True)
weights, state = get_state_dict(backend.model, backend.optimizer, options=options)
torch.save((weights, state["state"]), run.path / f"found_{rank}.pt")
state = TrainState(step=3, tokens=9, data={}, fingerprint=fingerprint(config.recipe, "c", "t"))
save(run, backend, state, attempt=0)
torch.set_grad_enabled(False)
for chunk in backend.chunks:
    check(chunk, config.recipe.model, run.checkpoint(3))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
for family in ("neox", "llama"):
    folder = run.path / family
    model_config = read_origin(folder).model.model_copy(update={"vocab_pad_multiple": 16})
    model = build_model(model_config)
    fill(model, weight_reader(folder, model_config))
    apply_tensor_parallel(model, mesh["tensor"], sequence=False)
    for block in model.blocks():
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    check(model, model_config, folder)
try:
    backend.load_shards(run.path / "damaged")
except StorageError as error:
    (run.path / f"error_{rank}").write_text(str(error))
control.barrier()  # rank 0 has the store that the others still connect by
backend.stop()
"""


@pytest.mark.parametrize("precision", sample(1, ["bf16_sr", "fp32"]))
def test_native_workers_read_it(tmp_path: Path, precision: str) -> None:
    whole = random_whole("gpt3", seed=3)
    model = (f"model.{key}={value}" for key, value in whole.model.model_dump().items() if value)
    run = make_run(
        tmp_path / "run",
        make_data(tmp_path),
        *model,
        f"train.precision={precision}",
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "train.micro_batch=4",
        "cluster.devices_per_node=4",
    )
    recipe = load(run.config).recipe
    assert recipe.model == whole.model
    layout = Layout(4, 2, 3, dtype="bfloat16")
    write_nxd(run.path / "nxd", whole, layout)
    TrainState(
        step=7, tokens=9, data={}, fingerprint=fingerprint(recipe, "corpus", "tokenizer")
    ).save(run.path / "nxd/train_state.json")
    for family in ("neox", "llama"):
        # Of 40, 44, 28, … rows in 3 layers the workers get unequal shares.
        write(run.path / family, config(family))
    write_nxd(run.path / "damaged", whole, layout)
    gone = "dp_rank_02_tp_rank_03_pp_rank_01.pt"
    (run.path / "damaged/nxd/optim" / gone).unlink()
    gang = Gang(run, world=4, entry=_WORKER)
    assert gang.wait(280) == [0] * 4, gang.output()
    dtype = torch.bfloat16 if precision == "bf16_sr" else torch.float32
    seen: set[str] = set()
    for rank in range(4):
        weights, state = torch.load(run.path / f"found_{rank}.pt")
        for name, result in weights.items():
            seen.add(name)
            pairs: list[tuple[Tensor, Tensor]] = [(result, whole.weights[name])]
            pairs += [(state[name][kind], held[name]) for kind, held in whole.moments.items()]
            for got, expected in pairs:
                assert got.dtype == dtype
                assert torch.equal(got, expected.to(dtype)), (rank, name)
            assert state[name]["step"] == whole.step
        assert gone in (run.path / f"error_{rank}").read_text()  # on all workers alike
    assert seen == set(whole.weights)
    assert_holds(open_training(run.checkpoint(3), whole.model), whole, dtype)
