"""In from Hugging Face, through our model, and out again, for every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import assert_rounded, forward_terms
from safetensors.torch import save_file
from torch import nn

from slurmllm.core.config.huggingface import read_config
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.run.artifact_records import ImportedModel
from slurmllm.data.tokenizer import train_tokenizer
from slurmllm.plan.parameters import parameters
from slurmllm.train.checkpoint.folder import file_faults, read_manifest
from slurmllm.train.checkpoint.formats import safetensors_files
from slurmllm.train.checkpoint.formats.exporting import plan_export, run_export
from slurmllm.train.checkpoint.formats.importing import plan_import, run_import
from slurmllm.train.checkpoint.formats.model_folders import TokenizerFiles, tokenizer_in
from slurmllm.train.checkpoint.formats.safetensors_files import write_index
from slurmllm.train.checkpoint.formats.weights import open_weights, weight_reader
from slurmllm.train.checkpoint.state import INDEX, MODEL, read_origin
from slurmllm.train.model.decoder import Decoder, build_model
from slurmllm.train.model.init import fill
from train.checkpoint import hub

pytestmark = pytest.mark.numerics

AutoModel = hub.transformers.AutoModelForCausalLM
MANY = 2000  # bytes of a file: a few tensors in each


def bring_in(source: Path, out: Path, shard_bytes: int = 10**9) -> ModelConfig:
    run_import(plan_import(source), out, shard_bytes)
    return read_origin(out).model


def ours(checkpoint: Path, config: ModelConfig) -> Decoder:
    model = build_model(config)
    fill(model, weight_reader(checkpoint, config))
    return model


def equal(a: nn.Module, b: nn.Module) -> None:
    theirs = b.state_dict()
    assert a.state_dict().keys() == theirs.keys()
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


ROPE = {"rope_type": "default", "rope_theta": 100.0}
SCALED = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False}
YARN["original_max_position_embeddings"] = 6
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 5,
    "sliding_window": 4,
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full", "full")],
}
OWN_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 77.0},
    "sliding_attention": {**YARN, "truncate": True},
}
CAPPED = {"final_logit_softcapping": 3.0, "rope_theta": 500.0, "rope_local_base_freq": 50.0}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("neox", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "attention_bias": False}),
    ("neox", {"use_parallel_residual": False, "hidden_act": "gelu_fast", "num_hidden_layers": 1}),
    ("neox", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0}, "layer_norm_eps": 1e-6}),
    ("neox", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "vocab_size": 11}),
    ("llama", {"rope_parameters": SCALED, "num_key_value_heads": 1, "head_dim": 10}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": ROPE, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.3}}),
    ("qwen3", {"rope_parameters": SCALED, "attention_bias": True}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3", {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ("mistral", {"sliding_window": 5, "head_dim": 10}),
    ("mistral", {"sliding_window": None, "rope_parameters": {**YARN, "truncate": True}}),
    ("smollm3", {"no_rope_layers": [1, 0, 0, 1, 1], "mlp_bias": True, "attention_bias": True}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 4, "no_rope_layer_interval": 2}),
    ("smollm3", {**WINDOWS, "use_sliding_window": True, "tie_word_embeddings": False}),
    ("olmo3", {"sliding_window": 4, "tie_word_embeddings": True}),
    ("olmo3", {**WINDOWS, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("olmo3", {"sliding_window": 3, "rope_parameters": OWN_ROPES, "attention_bias": True}),
    ("gemma3", {"num_hidden_layers": 7, "sliding_window": 5}),
    ("gemma3", {**WINDOWS, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("gemma3", {"sliding_window_pattern": 2, "query_pre_attn_scalar": 30, **CAPPED}),
    ("gemma3", {"layer_types": ["sliding_attention"] * 2, "tie_word_embeddings": False}),
    ("nanochat", {"attention_bias": True, "tie_word_embeddings": True}),
    ("nanochat", {"final_logit_softcapping": None, "rope_parameters": SCALED}),
    ("gpt3", {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": None}),
    ("gpt3", {"n_head": 1, "layer_norm_epsilon": 1e-6, "n_positions": 2}),
]


@pytest.mark.parametrize(("family", "settings"), MODELS)
def test_there_and_back(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    original = hub.small(family, **settings)
    sharded = len(settings) == 2
    source = hub.save(original, tmp_path / "hub", shard="2KB" if sharded else "5GB")
    size = MANY if sharded else 10**9
    config = bring_in(source, tmp_path / "ours", size)
    assert config.family == family
    logits = ours(tmp_path / "ours", config)(hub.tokens(original))
    expected = original(hub.tokens(original)).logits
    assert_rounded(logits[..., : config.vocab_size], expected, forward_terms(config))
    run_export(plan_export(tmp_path / "ours", TokenizerFiles({})), tmp_path / "back", size)
    back = AutoModel.from_pretrained(tmp_path / "back")
    assert type(back) is type(original)
    equal(original, back)
    assert parameters(config) == sum(tensor.numel() for tensor in original.parameters())
    again, faults = read_config(tmp_path / "back")
    assert (faults, again.model if again else None) == ([], config)
    resumed = back.eval()(hub.tokens(original)).logits
    assert_rounded(resumed, expected, forward_terms(config))


def test_the_text_model_of_images_and_text(tmp_path: Path) -> None:
    sizes = {**hub._GROUPED, "head_dim": 12, "vocab_size": 67, "pad_token_id": None}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = hub.transformers.Gemma3Config(
        text_config=sizes, vision_config=vision, mm_tokens_per_image=4, eos_token_id=[3, 5]
    )
    whole = hub.transformers.Gemma3ForConditionalGeneration(config).eval()
    source = hub.save(whole, tmp_path / "hub")
    config = bring_in(source, tmp_path / "ours")
    tokens = hub.tokens(whole.model.language_model)
    expected = whole(input_ids=tokens).logits
    logits = ours(tmp_path / "ours", config)(tokens)
    assert_rounded(logits, expected, forward_terms(config))
    run_export(plan_export(tmp_path / "ours", TokenizerFiles({})), tmp_path / "back", 10**9)
    back = AutoModel.from_pretrained(tmp_path / "back").eval()
    assert type(back).__name__ == "Gemma3ForCausalLM"
    assert back.config.eos_token_id == [3, 5]
    assert_rounded(back(tokens).logits, expected, forward_terms(config))


@pytest.mark.parametrize("family", ["gpt3", "qwen3"])
def test_files_of_a_sharded_and_of_a_whole_export(family: str, tmp_path: Path) -> None:
    source = hub.save(hub.small(family), tmp_path / "hub")
    bring_in(source, tmp_path / "ours", MANY)
    manifest = read_manifest(tmp_path / "ours")
    assert (manifest.step, manifest.tokens, manifest.attempt) == (0, 0, 0)
    assert file_faults(tmp_path / "ours", manifest.files) == []
    written = {str(p.relative_to(tmp_path / "ours")) for p in (tmp_path / "ours").rglob("*")}
    assert written == {file.path for file in manifest.files} | {"manifest.json"}
    shards = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    assert shards[0] == f"weights-00001-of-{len(shards):05d}.safetensors"
    modes = {(tmp_path / "ours" / name).stat().st_mode for name in ("model.json", *shards)}
    assert len(modes) == 1, "others may read the weights, too, if the umask lets them"
    assert len(shards) > 3
    plan = plan_export(tmp_path / "ours", TokenizerFiles({}))
    whole = ["config.json", "generation_config.json", "model.safetensors"]
    assert run_export(plan, tmp_path / "whole", 10**9) == whole
    names = run_export(plan, tmp_path / "many", MANY)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {n for n in names if n.endswith(".safetensors")}
    equal(
        AutoModel.from_pretrained(tmp_path / "whole"), AutoModel.from_pretrained(tmp_path / "many")
    )


def test_no_more_than_a_file_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def watched(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        stored = [tensor.untyped_storage().nbytes() for tensor in tensors.values()]
        held.append(sum(stored))
        assert held[-1] <= max(20_000, max(stored))
        save_file(tensors, path, metadata)

    monkeypatch.setattr(safetensors_files, "save_file", watched)
    source = hub.save(hub.small("llama"), tmp_path / "hub")
    bring_in(source, tmp_path / "ours", 20_000)
    run_export(plan_export(tmp_path / "ours", TokenizerFiles({})), tmp_path / "back", 20_000)
    assert len(held) >= 6


@pytest.mark.parametrize("family", ["neox", "llama", "gemma3", "nanochat"])
def test_bf16_stays_and_is_made(family: str, tmp_path: Path) -> None:
    original = hub.small(family)
    half = hub.save(original.to(torch.bfloat16), tmp_path / "hub")
    bring_in(half, tmp_path / "ours")
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        out = tmp_path / str(expected)
        run_export(plan_export(tmp_path / "ours", TokenizerFiles({}), dtype), out, 10**9)
        back = AutoModel.from_pretrained(out, dtype="auto")
        assert back.dtype == expected
        equal(original.to(expected), back)
    run_import(plan_import(tmp_path / "torch.float32", torch.bfloat16), tmp_path / "b", 10**9)
    for file in (tmp_path / "ours").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("family", "missing"), [("neox", ("mlp_bias",)), ("gpt3", ("mlp_bias", "attention_bias"))]
)
def test_biases_that_ours_lack_are_0(family: str, missing: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    bring_in(hub.save(hub.small(family), tmp_path / "hub"), folder)
    record = ImportedModel.load(folder / MODEL)
    model = {**record.model, **dict.fromkeys(missing, False)}
    record.model_copy(update={"model": model}).save(folder / MODEL)
    config = read_origin(folder).model
    with pytest.raises(StorageError, match=r"layers\.1\.mlp\.up\.bias: is no tensor of this model"):
        plan_export(folder, TokenizerFiles({}))
    weights, parameters = (
        open_weights(read_origin(folder)),
        dict(build_model(config).named_parameters()),
    )
    (file,) = folder.glob("*.safetensors")
    save_file({name: weights.read(name).clone() for name in parameters}, file)
    write_index(folder / INDEX, dict.fromkeys(parameters, file.name), 0)
    run_export(plan_export(tmp_path / "ours", TokenizerFiles({})), tmp_path / "back", 10**9)
    back = AutoModel.from_pretrained(tmp_path / "back").eval()
    logits = ours(tmp_path / "ours", config)(hub.tokens(back))
    assert_rounded(logits, back(hub.tokens(back)).logits, forward_terms(config))


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    source = hub.save(hub.small("neox", vocab_size=300), tmp_path / "hub")
    (source / "tokenizer.json").write_text(train_tokenizer(["to be or not to be"] * 9, 300))
    bring_in(source, tmp_path / "ours")
    assert read_origin(tmp_path / "ours").imported is not None
    tokenizer = tokenizer_in(tmp_path / "ours" / "tokenizer")
    run_export(plan_export(tmp_path / "ours", tokenizer), tmp_path / "back", 10**9)
    loaded = hub.transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert loaded.decode(loaded("to be")["input_ids"]) == "to be"
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)
    # A second time: what lies beside tokenizer.json now goes along as it is.
    bring_in(tmp_path / "back", tmp_path / "again")
    assert sorted(p.name for p in (tmp_path / "again" / "tokenizer").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
