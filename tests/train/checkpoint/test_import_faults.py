"""What cannot be imported: each fault by its name, all at once, nothing left behind."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from slurmllm.cli.main import cli
from slurmllm.core.errors import ConfigError, DataError, RunError, SlurmllmError, StorageError
from slurmllm.data.tokenizer import train_tokenizer
from slurmllm.train.checkpoint.formats import safetensors_files
from slurmllm.train.checkpoint.formats.exporting import plan_export, run_export
from slurmllm.train.checkpoint.formats.importing import plan_import, run_import
from slurmllm.train.checkpoint.formats.model_folders import TokenizerFiles
from train.checkpoint import hub

INDEX = "model.safetensors.index.json"
SAVED = ("neox", "llama", "gpt3", "qwen3", "mistral", "smollm3", "olmo3", "gemma3")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
SCALED = {"rope_type": "linear", "rope_theta": 100.0}
TWO = (("full", 2.0), ("sliding", 3.0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hub")
    folders = {family: hub.save(hub.small(family), folder / family) for family in SAVED}
    folders["sharded"] = hub.save(hub.small("llama"), folder / "sharded", shard="20KB")
    return folders


@pytest.fixture
def copy(saved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(saved[name], tmp_path / "source" / name))

    return copied


def refused(source: Path, kind: type[SlurmllmError] = ConfigError) -> str:
    with pytest.raises(SlurmllmError) as caught:
        plan_import(source)
    assert type(caught.value) is kind, caught.value
    assert caught.value.exit_code == (4 if kind is StorageError else 2)
    return str(caught.value)


def settings(source: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    path = source / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def tensors(source: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(source / "model.safetensors")
    change(held)
    save_file(held, source / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        (
            "llama",
            {"architectures": ["PhiForCausalLM"], "model_type": "phi"},
            "architectures: PhiForCausalLM is not known; known are GPTNeoXForCausalLM, "
            "LlamaForCausalLM, GPT2LMHeadModel, Qwen3ForCausalLM",
        ),
        ("llama", {"model_type": "phi"}, "model_type: 'phi' is not known; known are"),
        ("llama", {"model_type": "gpt2"}, "model_type: 'gpt2' is not that of LlamaForCausalLM"),
        ("llama", {"architectures": None, "model_type": None}, "must name the model's class"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling: positions scaled by 'longrope' are not supported; known are 'default', ",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
            "factor, low_freq_factor, high_freq_factor must be set with kind llama3",
        ),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mrope_section": [2, 2]}},
            "rope_scaling.mrope_section: [2, 2] is not known for 'yarn'",
        ),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window: True is not supported"),
        (
            "qwen3",  # transformers computes a mask with no window, and fails
            {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types: sliding_attention needs use_sliding_window; set full_attention",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types: must be a list with sliding"),
        (
            "llama",
            {"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 10**400},
            "1 error\n  max_position_embeddings: 1000",
        ),
        (
            "llama",
            {"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": -(10**400)},
            "1 error\n  max_position_embeddings: -1000",
        ),
        ("gemma3", {"query_pre_attn_scalar": 30.5}, "query_pre_attn_scalar: 30.5: Input should be"),
        ("llama", {"num_local_experts": 8}, "num_local_experts: 8 is not supported: the decoder"),
        ("llama", {"kv_lora_rank": 512}, "the decoder has no latent attention (MLA)"),
        (
            "mistral",  # once, not for each layer
            {"sliding_window": 2**50},
            "1 error\n  sliding_window: 1125899906842624: Input should be less than",
        ),
        (
            "gemma3",
            {"rope_parameters": None, "rope_local_base_freq": "x"}
            | {"num_hidden_layers": 7, "layer_types": None},
            "1 error\n  rope_local_base_freq: 'x': must be none, or a base above 0",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window: 0 is not a number of tokens"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "all layers have the sliding_window"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: must be a list with 1 or 0 of 5"),
        (
            "smollm3",
            {"no_rope_layers": [1, 0, 2, 1, 1]},
            "no_rope_layers: 2 is not supported; only",
        ),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 5},
            "layer_types: sliding_attention needs a sliding_window",
        ),
        (
            "olmo3",
            {"layer_types": ["chunked_attention"] * 5},
            "layer_types: 'chunked_attention' is not supported; only sliding_attention and full_at",
        ),
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_type: is not a type of layer",
        ),
        (
            "olmo3",
            {"rope_parameters": None, "rope_theta": 10000.0},
            "rope_theta: 10000.0 is for all layers in version 4",
        ),
        (
            "olmo3",
            {"rope_parameters": {f"{t}_attention": SCALED | {"factor": f} for t, f in TWO}},
            "only one type of layers may have scaled positions",
        ),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": YARN | {"truncate": False}}},
            "truncate: transformers' model of the family olmo3 always rounds",
        ),
        ("gemma3", {"use_bidirectional_attention": True}, "has no attention to later tokens"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "it must be None"),
        (
            "gemma3",
            {"layer_types": None, "_sliding_window_pattern": 3},
            "_sliding_window_pattern: is not read",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "model.rotary_pct: 0.5"),
        ("neox", {"head_dim": 16}, "model.head_dim: 16 times 4 heads is not model.hidden_size 32"),
        ("llama", {"head_dim": {}}, "head_dim: {}: Input should be a valid integer"),
        ("llama", {"bos_token_id": "<s>"}, "bos_token_id: must be the number of a token"),
        ("llama", {"hidden_act": "relu"}, "hidden_act: 'relu' is not known; known are gelu"),
        ("llama", {"hidden_size": None}, "hidden_size: is missing"),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config: quantized weights (gptq)",
        ),
        ("gpt3", {"scale_attn_weights": False}, "scale_attn_weights: False is not supported"),
        ("neox", {"rope_parameters": 3}, "rope_parameters: must be a mapping, not 3"),
    ],
)
def test_configs(
    copy: Callable[[str], Path], family: str, changes: dict[str, Any], expected: str
) -> None:
    source = copy(family)
    settings(source, **changes)
    assert expected in refused(source)


def test_all_faults_at_once(copy: Callable[[str], Path]) -> None:
    source = copy("sharded")
    settings(source, hidden_act="relu", rope_scaling={"type": "su"}, bos_token_id="<s>")
    shard = source / "model-00001-of-00005.safetensors"
    shard = shard if shard.exists() else sorted(source.glob("*.safetensors"))[0]
    shard.unlink()
    message = refused(source)
    for part in ("'relu'", "'su'", "'<s>'", f"{shard.name} cannot be read: No such file"):
        assert part in message
    assert "4 errors" in message


def test_missing_extra_and_misshaped_tensors(copy: Callable[[str], Path]) -> None:
    source = copy("llama")

    def change(held: dict[str, torch.Tensor]) -> None:
        del held["model.norm.weight"]
        held["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
        held["model.layers.1.mlp.up_proj.weight"] = torch.ones(32, 40)
        held["model.layers.1.mlp.down_proj.weight"] = torch.ones(32, 40, dtype=torch.int8)

    tensors(source, change)
    assert refused(source).splitlines()[1:] == [
        "  model.layers.0.self_attn.q_norm.weight: is no tensor of this model; [8] was found",
        "  model.layers.1.mlp.up_proj.weight: is [32, 40]; [40, 32] was expected",
        "  model.layers.1.mlp.down_proj.weight: is of type I8; weights must be one of F64, F32, "
        "F16, BF16",
        "  model.norm.weight: is missing; [32] was expected",
    ]


NEOX_BUFFERS = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")
OLDER = [
    ("neox", "gpt_neox.", [f"layers.0.{name}" for name in NEOX_BUFFERS]),
    ("llama", "model.", ["layers.0.self_attn.rotary_emb.inv_freq"]),
    ("gpt3", "transformer.", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
]


@pytest.mark.parametrize(("family", "prefix", "buffers"), OLDER)
def test_what_older_files_hold_is_passed_over(
    copy: Callable[[str], Path], tmp_path: Path, family: str, prefix: str, buffers: list[str]
) -> None:
    source = copy(family)
    run_import(plan_import(source), tmp_path / "plain", 10**9)

    def change(held: dict[str, torch.Tensor]) -> None:
        for name in buffers:
            held[prefix + name] = torch.ones(1, 1, 2, 2, dtype=torch.bool)
        if family == "gpt3":
            held["lm_head.weight"] = held["transformer.wte.weight"].clone()
        if family == "neox" and "embed_out.weight" in held:
            held["lm_head.weight"] = held.pop("embed_out.weight")
        for name in list(held):  # saved without the head around it
            if name.startswith(prefix):
                held[name.removeprefix(prefix)] = held.pop(name)

    tensors(source, change)
    run_import(plan_import(source), tmp_path / "older", 10**9)
    plain, older = (
        next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in ("plain", "older")
    )
    assert plain == older


def test_a_tied_head_that_is_another(copy: Callable[[str], Path]) -> None:
    source = copy("gpt3")
    tensors(source, lambda held: held.update({"lm_head.weight": torch.ones(67, 32)}))
    message = refused(source)
    assert "lm_head.weight: is not equal to transformer.wte.weight" in message
    settings(source, tie_word_embeddings=False)
    assert plan_import(source).config.model.tied_embeddings is False


def test_a_tensor_under_two_names(copy: Callable[[str], Path]) -> None:
    source = copy("gpt3")
    tensors(source, lambda held: held.update({"wpe.weight": torch.ones(24, 32)}))
    assert "is also stored as" in refused(source)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: cut(path, path.stat().st_size - 1), "is cut short or damaged: "),
        (lambda path: cut(path, 3), "is cut short or damaged: "),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is cut short or damaged: "),
        (lambda path: path.write_bytes(b"\x04" + bytes(7) + b"[13]"), "is cut short or damaged: "),
        (
            lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid 1\n"),
            "is a Git LFS pointer",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"F32", b"F99")),
            "is cut short or damaged: ",
        ),
    ],
)
def test_damaged_files(
    copy: Callable[[str], Path], damage: Callable[[Path], None], expected: str
) -> None:
    source = copy("sharded")
    file = sorted(source.glob("*.safetensors"))[-1]
    damage(file)
    assert f"{file.name} {expected}" in refused(source, StorageError)


def test_an_index_that_is_wrong(copy: Callable[[str], Path]) -> None:
    source = copy("sharded")
    path = source / INDEX
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    moved = dict(index["weight_map"])
    name = next(key for key, file in moved.items() if file == files[0])
    moved[name] = files[1]
    path.write_text(json.dumps({"weight_map": moved}))
    assert f"the index places {name} in {files[1]}, which does not" in refused(source, StorageError)
    path.write_text(json.dumps({"weight_map": {**moved, "x": "../elsewhere.safetensors"}}))
    assert "names '../elsewhere.safetensors', outside the folder" in refused(source, StorageError)


@pytest.mark.parametrize(
    ("kind", "name", "content", "reason"),
    [
        (ConfigError, "config.json", b"{", "is not JSON"),
        (ConfigError, "config.json", b"[1]", "holds no mapping"),
        (ConfigError, "config.json", b"\xff", "is not JSON"),
        (StorageError, INDEX, b"{", "is no index of safetensors files"),
        (StorageError, INDEX, b"[]", "is no index of safetensors files"),
        (StorageError, INDEX, b'{"weight_map": 3}', "is no index of safetensors files"),
        (DataError, "tokenizer.json", b"", "is not a tokenizer.json"),
        (DataError, "tokenizer.json", b"\xff\xfe", "is not a tokenizer.json"),
        (DataError, "tokenizer.json", b'{"version": "1.0"}', "is not a tokenizer.json"),
        (DataError, "tokenizer.json", b"[" * 100_000, "is refused: it is nested too deeply"),
        (DataError, "vocab.json", b"{", "is not readable JSON"),
        (DataError, "generation_config.json", b"[]", "is not a JSON object"),
    ],
)
def test_files_that_are_none(
    copy: Callable[[str], Path], kind: type[SlurmllmError], name: str, content: bytes, reason: str
) -> None:
    source = copy("sharded")
    (source / name).write_bytes(content)
    message = refused(source, kind)
    assert name in message
    assert reason in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 300, "xx cannot be read: File name too long"),
        ("x\0", "x\0 cannot be read: "),  # what follows differs between versions of Python
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_an_index_with_a_name_of_no_file(
    copy: Callable[[str], Path], name: str, reason: str
) -> None:
    source = copy("sharded")
    index = {"weight_map": {"x": name}}
    (source / INDEX).write_text(json.dumps(index))
    assert reason in refused(source, StorageError)


def test_no_weights_and_pickled_ones(copy: Callable[[str], Path]) -> None:
    source = copy("neox")
    (source / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refused(source, StorageError)
    (source / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin: pickled weights are not read" in refused(source, StorageError)
    assert "config.json: is missing" in refused(source / "nowhere")


def test_nothing_is_left_of_an_import_that_fails(
    copy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_import(copy("neox"))
    out = tmp_path / "new" / "deeper" / "ours"

    errors = [OSError(28, "No space left on device"), KeyboardInterrupt()]

    def fails(held: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise errors.pop(0)

    monkeypatch.setattr(safetensors_files, "save_file", fails)
    with pytest.raises(StorageError, match=r"cannot write .*ours: No space left on device"):
        run_import(plan, out, 10**9)
    assert not (tmp_path / "new").exists()
    out.parent.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        run_import(plan, out, 10**9)
    assert list(out.parent.iterdir()) == []


def test_what_is_there_is_left_alone(copy: Callable[[str], Path], tmp_path: Path) -> None:
    plan = plan_import(copy("neox"))
    out = tmp_path / "ours"
    out.mkdir()
    run_import(plan, out, 10**9)  # an empty folder is no loss
    before = sorted(out.iterdir())
    with pytest.raises(RunError, match="is not empty"):
        run_import(plan, out, 10**9)
    assert sorted(out.iterdir()) == before
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunError, match="is a file"):
        run_import(plan, file, 10**9)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_refusal_of_the_file_system_is_told(tmp_path: Path) -> None:
    part = {"a": torch.ones(3)}
    with pytest.raises(OSError, match="No such file or directory"):
        safetensors_files.write_shards(
            tmp_path / "absent", {"x": [0]}, [12], lambda _: part, lambda _: None
        )


@pytest.mark.parametrize("value", [10**18, 100_001])
def test_more_layers_than_any_model_has(copy: Callable[[str], Path], value: int) -> None:
    source = copy("llama")
    settings(source, num_hidden_layers=value)
    began = time.process_time()
    message = refused(source)
    assert time.process_time() - began < 5
    assert f"num_hidden_layers: {value!r}: Input should be less than or equal to 100000" in message


def test_a_tokenizer_of_another_model(copy: Callable[[str], Path]) -> None:
    source = copy("llama")
    (source / "tokenizer.json").write_text(train_tokenizer(["a b c"], 300))
    assert "entries and the model 67" in refused(source, DataError)


def small_tokenizer() -> str:
    vocab = {"a": 0, "b": 1}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    return json.dumps({"version": "1.0", "model": model, "added_tokens": []})


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt"])
def test_a_link_to_a_file_of_the_user_s(
    copy: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """It was copied into what he publishes."""
    secret = tmp_path / "secret"
    secret.write_text(small_tokenizer())
    source = copy("llama")
    (source / name).symlink_to(secret)
    assert f"is a link to {secret}, outside the model's folder" in refused(source, DataError)


def test_links_of_the_hub_s_cache(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """models--x--y/snapshots/REVISION/tokenizer.json → ../../blobs/HASH"""
    cache = tmp_path / "models--x--y"
    source = cache / "snapshots" / "abc"
    source.parent.mkdir(parents=True)
    shutil.move(copy("llama"), source)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "hash").write_text(small_tokenizer())
    (source / "tokenizer.json").symlink_to("../../blobs/hash")
    run_import(plan_import(source), tmp_path / "out", 10**9)
    assert (tmp_path / "out/tokenizer/tokenizer.json").read_text() == small_tokenizer()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 493443\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_generation_config_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = hub.save(hub.small("llama"), tmp_path / "source")
    content = '{"temperature": 0.6, "eos_token_id": [3, 5]}'
    (source / "generation_config.json").write_text(content)
    done = run("checkpoint", "import", source, "--out", "ours", "--json")
    assert json.loads(done.stdout)["tokenizer"] == []
    assert run("checkpoint", "export", "ours", "--out", "back").exit_code == 0
    assert Path("back/generation_config.json").read_text() == content


@pytest.mark.parametrize(
    "arguments",
    [
        lambda path: ("checkpoint", "import", path, "--out", "out"),
        lambda path: ("evaluate", path, "--task", "validation"),
    ],
)
def test_an_adapter_is_no_model(
    arguments: Callable[[Path], tuple[object, ...]], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    done = run(*arguments(tmp_path))
    assert done.exit_code == 2
    assert "an adapter (LoRA), not a model; merge it" in done.stderr


def test_pointers_are_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokenizer.json", "a.parquet", "a.jsonl", "a.txt"):
        Path(name).write_bytes(POINTER)
    Path("b.txt").write_text("text")
    assert run("data", "build", "b.txt", "--out", "c.arrow").exit_code == 0
    for arguments in (
        ("data", "inspect", "c.arrow", "--tokenizer", "tokenizer.json"),
        *(
            ("data", "build", name, "--out", "d.arrow")
            for name in ("a.parquet", "a.jsonl", "a.txt")
        ),
    ):
        done = run(*arguments)
        assert done.exit_code == 2
        assert "a Git LFS pointer, not the file; fetch it with `git lfs pull`" in done.stderr


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_not_finite(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = hub.save(hub.small("llama", tie_word_embeddings=tied), Path("hub"))
    up = "model.layers.1.mlp.up_proj.weight"
    names = {"model.embed_tokens.weight": ("nan", 1), up: ("inf", 3)}

    def change(held: dict[str, torch.Tensor]) -> None:
        for name, (value, number) in names.items():
            held[name].view(-1)[:number].fill_(float(value))
        if tied:
            held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()

    tensors(source, change)
    done = run("checkpoint", "import", "hub", "--out", "out", "--json")
    assert done.exit_code == 2
    assert not Path("out").exists()
    file = "in model.safetensors"
    for line in (
        f"model.embed_tokens.weight {file}: 1 of 2,144 weights is NaN or infinite",
        f"{up} {file}: 3 of 1,280 weights are NaN or infinite",
    ):
        assert line in done.stderr
    assert "fetch it again" in done.stderr


def test_weights_that_a_type_makes_infinite(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("llama")
    large = 3.4e38  # above the largest of bf16
    tensors(source, lambda held: held["model.norm.weight"][:2].fill_(large))
    run_import(plan_import(source), tmp_path / "fp32", 10**9)
    with pytest.raises(DataError, match=r"final_norm.weight, as torch.bfloat16: 2 of 32 weights"):
        run_import(plan_import(source, torch.bfloat16), tmp_path / "bf16", 10**9)
    assert not (tmp_path / "bf16").exists()


def test_an_export_of_a_diverged_model_warns(
    copy: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_import(plan_import(copy("llama")), tmp_path / "ours", 10**9)
    (file,) = (tmp_path / "ours").glob("*.safetensors")
    held = load_file(file)
    held["final_norm.weight"][0] = float("inf")
    save_file(held, file)
    run_export(plan_export(tmp_path / "ours", TokenizerFiles({})), tmp_path / "back", 10**9)
    assert "final_norm.weight: 1 of 32 weights is NaN or infinite" in caplog.text
    assert (tmp_path / "back" / "model.safetensors").exists()
