"""The decoder against transformers' models: logits, loss and every gradient, in fp32.

With and without masks between documents and ignored labels.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_rounded, forward_terms, gradient_terms
from torch import Tensor, nn
from torch.nn import functional as F

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.huggingface import write_config
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.rules import broken_rules
from slurmllm.core.config.yaml_source import flatten
from slurmllm.train.checkpoint.formats.huggingface import tensor_mappings
from slurmllm.train.model import IGNORED
from slurmllm.train.model.attention import document_mask, slice_order
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import initialize
from slurmllm.train.model.output import Output

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.numerics


@st.composite
def configs(draw: st.DrawFn, family: str) -> ModelConfig:
    heads, head_dim = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([4, 8, 12]))
    values: dict[str, Any] = {
        "family": family,
        "num_layers": draw(st.integers(1, 3)),
        "hidden_size": heads * head_dim,
        "num_heads": heads,
        "ffn_hidden_size": draw(st.sampled_from([8, 33, 48, 64])),
        "vocab_size": draw(st.integers(11, 97)),
        "vocab_pad_multiple": draw(st.sampled_from([1, 8, 64])),
        "seq_len": draw(st.integers(2, 40)),
        "rotary_base": draw(st.sampled_from([100.0, 10000.0])),
        "tied_embeddings": draw(st.booleans()),
        "init_std": 0.1,
        "norm_eps": draw(st.sampled_from([1e-5, 1e-3])),
    }
    if family == "neox":
        values["rotary_pct"] = draw(st.integers(0, head_dim // 2)) * 2 / head_dim
        values["parallel_residual"] = draw(st.booleans())
        values["attention_bias"] = draw(st.booleans())
    if family in ("llama", "qwen3"):
        values["num_kv_heads"] = draw(st.sampled_from([d for d in (1, 2, 3, 6) if heads % d == 0]))
        values["attention_bias"] = draw(st.booleans())
        # A norm of two dimensions amplifies rounding.
        narrow = 2 if family == "llama" else 4
        values["head_dim"] = draw(st.sampled_from([None, narrow, 6, 16]))
        values["rope_scaling"] = draw(st.none() | rope_scalings())
        if family == "llama":
            values["mlp_bias"] = draw(st.booleans())
    elif family in NEW:
        values["num_kv_heads"] = draw(st.sampled_from([d for d in (1, 2, 3, 6) if heads % d == 0]))
        values["head_dim"] = draw(st.sampled_from([None, 6, 16]))
        values["attention_pattern"] = draw(patterns(family))
        values["rope_scaling"] = draw(st.none() | rope_scalings())
        for name in FAMILIES[family].optional & {"logits_softcap", "query_pre_attn_scalar"}:
            values[name] = draw(st.sampled_from([None, 3.0, 20.0]))
    else:
        values["activation"] = draw(st.sampled_from(["gelu", "gelu_tanh"]))
    if family in ("olmo3", "gemma3") and values["rope_scaling"]:
        values["rope_scaling"].pop("truncate", None)
    config = ModelConfig.model_validate(values)
    assert not [*broken_rules(flatten(config.model_dump(), "model."))]
    return config


NEW = ("mistral", "smollm3", "olmo3", "gemma3", "nanochat")


@st.composite
def patterns(draw: st.DrawFn, family: str) -> list[dict[str, Any]]:
    """Attention of layers, periodic or not, that transformers' model of the family can have."""
    window = draw(st.sampled_from([1, 3, 9, 50]))
    local = {"window": window, "rope": draw(st.sampled_from([None, 50.0]))}
    kinds: dict[str, list[dict[str, Any]]] = {
        "mistral": [{"window": window}],
        "smollm3": [{}, {"window": window}, {"rope": "none"}, {"window": window, "rope": "none"}],
        "olmo3": [{}, local],
        "gemma3": [{}, local],
        "nanochat": [{}],
    }
    count = 1 if family == "mistral" else draw(st.integers(1, 3))
    return [draw(st.sampled_from(kinds[family])) for _ in range(count)]


@st.composite
def rope_scalings(draw: st.DrawFn) -> dict[str, Any]:
    """Scalings that divide, blend and keep frequencies of texts as short as the test's."""
    kind = draw(st.sampled_from(["llama3", "yarn", "linear", "dynamic"]))
    values = {"kind": kind, "factor": draw(st.sampled_from([1.0, 2.0, 2.3, 8.0]))}
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = draw(st.sampled_from([8, 20, 8192]))
    if kind == "llama3":
        values["low_freq_factor"] = draw(st.sampled_from([0.5, 1.0]))
        values["high_freq_factor"] = draw(st.sampled_from([2.0, 4.0]))
    if kind == "yarn":
        values["truncate"] = draw(st.booleans())
        values |= draw(
            st.sampled_from(
                [
                    {},
                    {"beta_fast": 3, "beta_slow": 0.3, "attention_factor": 1.25},
                    {"mscale": 0.7, "mscale_all_dim": 1.0},
                ]
            )
        )
    return values


ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}


def reference(c: ModelConfig) -> nn.Module:
    """transformers' model of the same shape, its vocabulary not padded."""
    if c.family in NEW:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            write_config(c, path, dtype="float32", bos_token_id=0, eos_token_id=0)
            config = transformers.AutoConfig.from_pretrained(folder)
        auto = transformers.AutoModelForCausalLM
        return cast(nn.Module, auto.from_config(config, attn_implementation="eager"))
    common = {
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tied_embeddings,
        "attn_implementation": "eager",
    }
    if c.family == "gpt3":
        gpt2 = transformers.GPT2Config(
            **common,
            n_positions=c.seq_len,
            n_embd=c.hidden_size,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            n_inner=c.ffn_hidden_size,
            layer_norm_epsilon=c.norm_eps,
            activation_function=ACTIVATIONS[c.activation],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return cast(nn.Module, transformers.GPT2LMHeadModel(gpt2))
    common |= {
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.ffn_hidden_size,
        "max_position_embeddings": c.seq_len,
        "hidden_act": ACTIVATIONS[c.activation],
        "attention_bias": c.attention_bias,
    }
    rope = {"rope_type": "default", "rope_theta": c.rotary_base}
    if c.rope_scaling is not None:
        rope |= c.rope_scaling.model_dump(exclude={"kind"}) | {"rope_type": c.rope_scaling.kind}
    if c.family != "neox":
        common |= {
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_width,
            "rms_norm_eps": c.norm_eps,
            "rope_parameters": rope,
        }
    if c.family == "llama":
        llama = transformers.LlamaConfig(**common, mlp_bias=c.mlp_bias)
        return cast(nn.Module, transformers.LlamaForCausalLM(llama))
    if c.family == "qwen3":
        return cast(nn.Module, transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common)))
    neox = transformers.GPTNeoXConfig(
        **common,
        use_parallel_residual=c.parallel_residual,
        layer_norm_eps=c.norm_eps,
        rope_parameters=rope | {"partial_rotary_factor": c.rotary_pct},
    )
    return cast(nn.Module, transformers.GPTNeoXForCausalLM(neox))


NAMES = {
    "neox": {
        "embed": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
        "layers": "gpt_neox.layers",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.qkv": "attention.query_key_value",
        "attention.out": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    "llama": {
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "layers": "model.layers",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.out": "self_attn.o_proj",
        "mlp.down": "mlp.down_proj",
    },
    "gpt3": {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "layers": "transformer.h",
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
}


NAMES["qwen3"] = NAMES["llama"] | {
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


def theirs(name: str, values: Tensor, c: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """One of our tensors, a parameter or its gradient, as transformers names and orders it."""
    if c.family in NEW:
        (mapping,) = (mapping for mapping in tensor_mappings(c) if mapping.ours == name)
        values = values[: mapping.shape[0]]
        yield from zip(mapping.theirs, mapping.layout.split(c, values), strict=True)
        return
    module, _, leaf = name.rpartition(".")
    names, prefix = NAMES[c.family], ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"{names['layers']}.{layer}."
    if module in ("embed", "head"):
        values = values[: c.vocab_size]
    if module == "attention.qkv":
        group = c.num_heads // c.kv_heads
        grouped = values.unflatten(0, (c.kv_heads, group + 2, c.head_width))
        q, k, v = (part.flatten(0, 1) for part in grouped.split([group, 1, 1], dim=1))
        if c.family == "neox":  # q, k and v of each head, in the order of sliced rotation
            order = torch.tensor(slice_order(c.head_width, c.rotary_pct)).argsort()
            values = torch.stack([q[:, order], k[:, order], v], dim=1).flatten(0, 2)
        elif c.family == "gpt3":
            values = torch.cat([q, k, v]).flatten(0, 1)
        else:
            for letter, part in (("q", q), ("k", k), ("v", v)):
                yield f"{prefix}self_attn.{letter}_proj.{leaf}", part.flatten(0, 1)
            return
    if module == "mlp.gate_up":
        blocks = values.unflatten(0, (-1, 2, c.gate_block))
        yield f"{prefix}mlp.gate_proj.{leaf}", blocks[:, 0].flatten(0, 1)
        yield f"{prefix}mlp.up_proj.{leaf}", blocks[:, 1].flatten(0, 1)
        return
    if c.family == "gpt3" and values.ndim == 2 and prefix:  # Conv1D: [in, out]
        values = values.T
    yield f"{prefix}{names[module]}.{leaf}", values


def filled(config: ModelConfig) -> nn.Module:
    """Our model with weights of which none is without effect, biases and norms included."""
    model = build_model(config)
    initialize(model, config, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.1)
    return model


def documents(seq_len: int, how_many: float, generator: torch.Generator) -> Tensor:
    """Positions [2, seq] of documents that begin anywhere with the probability `how_many`."""
    places = torch.arange(seq_len).expand(2, -1)
    begins = torch.rand(2, seq_len, generator=generator) < how_many
    return places - torch.where(begins, places, 0).cummax(1).values


def masks(c: ModelConfig, positions: Tensor) -> Any:
    """The mask of documents, for families with types of layers one for each."""
    windows = {kind.window for kind in c.layer_kinds}
    window = max((window for window in windows if window), default=None)
    local = document_mask(positions, torch.float32, window)
    if c.family in ("smollm3", "olmo3", "gemma3"):
        full = document_mask(positions, torch.float32)
        return {"full_attention": full, "sliding_attention": local}
    return local


@pytest.mark.parametrize("family", [*sorted(NAMES), *NEW])
@settings(max_examples=amount(8, of=100), derandomize=True)
@given(data=st.data())
def test_logits_loss_and_gradients(family: str, data: st.DataObject) -> None:
    c = data.draw(configs(family))
    at_a_time = data.draw(st.sampled_from([2**27, 5 * c.vocab_size]))
    model, other = filled(c), reference(c)
    expected = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for their_name, values in theirs(name, parameter, c):
                expected[their_name].copy_(values)
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(0, c.vocab_size, (2, c.seq_len + 1), generator=generator)
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    positions, more = None, {}
    if how_many := data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])):
        positions = documents(c.seq_len, how_many, generator)
        more = {"attention_mask": masks(c, positions), "position_ids": positions}
    ignored = torch.rand(labels.shape, generator=generator)
    labels[ignored < data.draw(st.sampled_from([0.0, 0.5, 1.0]))] = IGNORED

    logits, their_logits = model(tokens, positions=positions), other(tokens, **more).logits
    assert_rounded(logits[..., : c.vocab_size], their_logits, forward_terms(c))
    with patch.object(Output, "logits_at_a_time", at_a_time):
        loss = model(tokens, labels, positions)
    sum_of_counted = F.cross_entropy(
        their_logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    their_loss = sum_of_counted / labels.numel()
    assert_rounded(loss, their_loss, forward_terms(c) + labels.numel())

    loss.backward()
    their_loss.backward()
    compared = set()
    # Some gradients are 0 but for rounding: softmax does not see a constant, such as keys' biases.
    largest = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for their_name, grad in theirs(name, parameter.grad, c):
            compared.add(their_name)
            exact, terms = expected[their_name].grad, gradient_terms(c, labels.numel())
            assert_rounded(grad, exact, terms, scale=largest, name=name)
        if name in ("embed.weight", "head.weight"):
            assert parameter.grad[c.vocab_size :].eq(0).all(), "padding learns nothing"
    assert compared == set(expected)
