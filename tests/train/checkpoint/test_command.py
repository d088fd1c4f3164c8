"""`slurmllm checkpoint` as a person types it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import Result
from command_line import answer, call, printed, refused
from rounding import assert_rounded, forward_terms
from torch import nn
from torch.optim import AdamW

from slurmllm.core.config.operation import CheckpointConfig
from slurmllm.core.config.recipe import Recipe
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint.replicas import open_replica
from slurmllm.train.checkpoint.shards import ShardWrite
from slurmllm.train.checkpoint.state import TrainState, fingerprint
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import initialize
from train.checkpoint import hub
from train.checkpoint.pretend import CONFIG, PretendBackend, PretendGang, save, save_at
from train.gang import make_data, make_run, small_config

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object) -> Result:
        return call("checkpoint", *(str(a) for a in arguments))

    return invoke


def write_checkpoint(run: RunDir, recipe: Recipe, step: int) -> nn.Module:
    """A real checkpoint, of one worker, as the native backend writes it."""
    import torch.distributed as dist

    from slurmllm.train.backends.native import dcp
    from slurmllm.train.backends.native.dcp import DcpSaver
    from slurmllm.train.backends.native.device import Device

    model = build_model(recipe.model)
    initialize(model, recipe.model, seed=step)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:

        class OneWorker(PretendBackend):
            def save_shards(self, directory: Path) -> ShardWrite:
                optimizer = AdamW(model.parameters())
                held = dcp.state_of(model, optimizer, 0)
                shards = DcpSaver(self.control, Device(), self.mesh, 0)
                return shards.begin(held, directory, asynchronous=False)

        held = TrainState(
            step=step, tokens=9, data={}, fingerprint=fingerprint(recipe, "corpus", "tokenizer")
        )
        save(run, OneWorker(PretendGang(1), 0), held, attempt=0)
    finally:
        dist.destroy_process_group()
    return model


@pytest.fixture
def trained(tmp_path: Path) -> tuple[RunDir, dict[int, nn.Module]]:
    """A run with checkpoints at steps 10 and 20; 400 tokens, a vocabulary of 500 padded to 512."""
    data = make_data(tmp_path)
    run_dir = make_run(
        tmp_path / "runs" / "a", data, "model.vocab_size=500", "model.vocab_pad_multiple=64"
    )
    recipe = small_config("model.vocab_size=500", "model.vocab_pad_multiple=64").recipe
    return run_dir, {step: write_checkpoint(run_dir, recipe, step) for step in (10, 20)}


def same_logits(folder: Path, model: nn.Module) -> None:
    loaded = hub.transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = loaded(tokens).logits, model(tokens)[..., :500]
    assert_rounded(logits, expected, forward_terms(model.config))


@pytest.mark.numerics
def test_checkpoint_in_transformers(run: Run, trained: tuple[RunDir, dict[int, nn.Module]]) -> None:
    directory, models = trained
    shown = printed(run("export", "10", "--run", "a", "--out", "hub"))
    assert "hub: 131K parameters, 524 kB of weights in 1 file, from " in shown
    names = "config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert sorted(p.name for p in Path("hub").iterdir()) == names.split()
    same_logits(Path("hub"), models[10])
    config = json.loads(Path("hub/config.json").read_text())
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (500, 0, 0)
    tokenizer = hub.transformers.AutoTokenizer.from_pretrained("hub")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.decode(tokenizer("the sing")["input_ids"]) == "the sing"

    options = ("--out", "b", "--dtype", "bf16", "--shard-size", "100KB", "--json")
    fields = answer(run("export", directory.checkpoint(20), *options))
    assert fields["tokenizer"] == ["tokenizer.json"]
    assert "model.safetensors.index.json" in fields["files"]
    loaded = hub.transformers.AutoModelForCausalLM.from_pretrained("b", dtype="auto")
    assert loaded.dtype == torch.bfloat16

    # The newest is damaged: the one before, and it is said.
    shard = next(directory.checkpoint(20).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    latest = run("export", "latest", "--run", "a", "--out", "c")
    assert latest.exit_code == 0
    assert "skipped a checkpoint that does not verify: step_00000020: __0_0" in latest.stderr
    same_logits(Path("c"), models[10])
    for name in ("a", "a@latest", f"{directory.path}@latest"):
        second_export = run("export", name, "--out", f"hub-{name.replace('/', '_')}")
        assert "skipped a checkpoint that does not verify" in second_export.stderr
        assert f"from {directory.checkpoint(10)}" in second_export.stdout
    assert f"from {directory.checkpoint(10)}" in run("export", "a@10", "--out", "e").stdout
    assert "does not verify" in refused(run("export", "a@20", "--out", "d"), 4)
    assert not Path("d").exists()


def test_into_our_format_and_back(run: Run) -> None:
    source = hub.save(hub.small("llama"), Path("source"), shard="20KB")
    made = answer(run("import", source, "--out", "new/ours", "--json"))
    assert made["architecture"] == "LlamaForCausalLM"
    assert made["model"]["num_kv_heads"] == 2
    assert run("verify", "new/ours").exit_code == 0
    text = run("import", source, "--out", "second", "--dtype", "bf16", "--shard-size", "1KiB")
    assert "second: LlamaForCausalLM, 18.3K parameters, " in text.stdout
    assert "source has no tokenizer.json: name the tokenizer in data.tokenizer" in text.stdout
    assert "train from it: --set train.init_from=second" in text.stdout
    assert answer(run("export", "new/ours", "--out", "back", "--json"))["tokenizer"] == []
    loaded = hub.transformers.AutoModelForCausalLM.from_pretrained("back")
    original = hub.transformers.AutoModelForCausalLM.from_pretrained("source")
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert "back is not empty; name a folder" in refused(run("export", "new/ours", "--out", "back"))
    flipped = next(Path("new/ours").glob("*.safetensors"))
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    assert f"{flipped.name} does not match its checksum" in refused(
        run("export", "new/ours", "--out", "other"), 4
    )


def test_tokenizers(run: Run, trained: tuple[RunDir, dict[int, nn.Module]], tmp_path: Path) -> None:
    directory, _ = trained
    moved = tmp_path / "elsewhere"
    shutil.copytree(directory.checkpoint(10), moved)
    bare = run("export", moved, "--out", "bare")
    assert "no tokenizer is known: --tokenizer FILE" in bare.stdout
    assert json.loads(Path("bare/config.json").read_text())["eos_token_id"] is None
    hub.transformers.AutoModelForCausalLM.from_pretrained("bare")
    (tmp_path / "tokenizer.json").rename(tmp_path / "mine.json")
    message = refused(run("export", "10", "--run", "a", "--out", "x"))
    assert "the run's tokenizer: cannot read tokenizer" in message
    assert "--tokenizer FILE" in message
    done = run("export", "10", "--run", "a", "--out", "x", "--tokenizer", "mine.json")
    assert done.exit_code == 0
    assert Path("x/tokenizer.json").read_bytes() == Path("mine.json").read_bytes()
    Path("kit").mkdir()  # what is next to a tokenizer.json belongs to it
    shutil.copy("mine.json", "kit/tokenizer.json")
    Path("kit/tokenizer_config.json").write_text('{"model_max_length": 7}')
    options = ("--run", "a", "--out", "z", "--tokenizer", "kit/tokenizer.json")
    assert run("export", "10", *options).exit_code == 0
    assert Path("z/tokenizer_config.json").read_text() == '{"model_max_length": 7}'
    values = json.loads(Path("mine.json").read_text())
    end = values["added_tokens"][0]
    more = [{**end, "id": 400 + i, "content": f"<extra_{i}>"} for i in range(400)]
    Path("big.json").write_text(json.dumps({**values, "added_tokens": [end, *more]}))
    assert "entries and the model 500; give the one that it was trained with" in refused(
        run("export", "10", "--run", "a", "--out", "y", "--tokenizer", "big.json")
    )
    assert not Path("y").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("export nowhere --out x", 2, "no checkpoint folder 'nowhere', and no run"),
        ("export . --out x", 2, "is not a checkpoint: it holds neither"),
        ("export 7 --run a --out x", 2, "no checkpoint of step 7; it has: 10, 20"),
        ("export a@7 --out x", 2, "no checkpoint of step 7; it has: 10, 20 (or use latest)"),
        ("convert a --to nxd --out x", 2, "checkpoint convert was removed; resume"),
        ("verify a@ten", 2, "no checkpoint of step ten"),
        ("export 10 --run b --out x", 2, "no run 'b'"),
        ("export 10 --run a --out full", 2, "full is not empty"),
        ("export 10 --run a --out x --shard-size big", 2, "such as 5GB"),
        ("export 10 --run a --out x --shard-size 5,5GB", 2, "such as 5GB"),
        ("export 10 --run a --out x --shard-size 5Gbit", 2, "such as 5GB"),
        ("verify full", 4, "full has no manifest.json"),
        ("list nowhere", 2, "no run 'nowhere'"),
    ],
)
def test_refusals(run: Run, arguments: str, code: int, message: str) -> None:
    make_saved(Path("runs/a"), (10, 20))
    Path("full").mkdir()
    Path("full/held").write_text("")
    result = run(*arguments.split())
    assert result.exit_code == code, result.output
    assert message in result.output
    assert not Path("x").exists()


def make_saved(path: Path, steps: Sequence[int], *overrides: str, attempt: int = 0) -> RunDir:
    folder = RunDir(path)
    folder.path.mkdir(parents=True)
    folder.config.write_text(small_config(*overrides).to_yaml() if overrides else CONFIG.to_yaml())
    save_at(folder, *steps, attempt=attempt)
    return folder


def test_list_shows_replicas(run: Run, tmp_path: Path) -> None:
    second = tmp_path / "second"
    folder = make_saved(Path("runs/a"), (10,), f"checkpoint.replica={second}")
    replica = open_replica(CheckpointConfig(replica=str(second)), "a")
    replica.put(folder.checkpoint(10))
    ours, theirs = answer(run("list", "a", "--json"))["checkpoints"]
    assert (ours["replica"], theirs["replica"]) == (False, True)
    assert theirs["path"] == str(second / "a" / "step_00000010")
    assert theirs["bytes"] == ours["bytes"]
    assert "replica in" in run("list", "a").stdout
    second.rename(tmp_path / "away")
    second.write_text("no folder")
    assert len(answer(run("list", "a", "--json"))["checkpoints"]) == 1


def test_list_and_verify(run: Run) -> None:
    folder = make_saved(Path("runs/a"), ())
    assert "run a has no checkpoint yet" in run("list", "a").stdout
    assert "has no checkpoint yet" in run("verify", "a").stderr
    save_at(folder, 10, 20, attempt=3)
    listed = answer(run("list", "a", "--json"))
    assert [c["step"] for c in listed["checkpoints"]] == [10, 20]
    assert [c["verified"] for c in listed["checkpoints"]] == [None, None]
    assert listed["checkpoints"][0]["attempt"] == 3
    assert "not checked" in run("list", "a").stdout
    verified = run("list", "a", "--verify").stdout
    assert verified.split()[:6] == ["step", "saved", "size", "attempt", "workers", "state"]
    assert verified.count("verified") == 2
    assert run("verify", "a").exit_code == 0
    (folder.checkpoint(20) / "shard_1").write_bytes(b"")
    (folder.checkpoint(10) / "manifest.json").unlink()
    assert "shard_1 has 0 bytes instead of 1000" in run("list", "a", "--verify").stdout
    done = run("verify", "a")
    assert done.exit_code == 4
    assert "step_00000010 has no manifest.json: its save did not finish" in done.stdout
    assert "  shard_1 has 0 bytes instead of 1000" in done.stdout
    item = run("verify", folder.checkpoint(20), "--json")
    assert item.exit_code == 4
    for name in ("a@20", "a@latest"):
        assert run("verify", name, "--json").stdout == item.stdout
    (held,) = json.loads(item.stdout)["checkpoints"]
    assert held["verified"] is False
    assert held["faults"] == ["shard_1 has 0 bytes instead of 1000"]
    assert "none of the checkpoints of run a verifies" in refused(
        run("export", "latest", "--run", "a", "--out", "x"), 4
    )


@pytest.mark.usefixtures("run")
def test_looking_needs_no_torch() -> None:
    make_saved(Path("runs/a"), (10,))
    script = (
        "import sys; from slurmllm.cli.main import cli\n"
        "for verb in (['list', 'a'], ['verify', 'a'], ['import', '--help']):\n"
        "    try: cli(['checkpoint', *verb])\n"
        "    except SystemExit as e: assert not e.code, e.code\n"
        "    assert 'torch' not in sys.modules, verb"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
