"""Published training runs as configurations of ours: what they were and what they reached."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, get_args

from slurmllm.core.config.recipe import TrainConfig
from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.step import Trainer

FOLDER = Path(__file__).parent / "published"
# Years of software, by a row's, for which constants are fitted together. llm-foundry's tables are
# of PyTorch 1.13 and 2.0 with FlashAttention 1; later rows have FlashAttention 2 or cuDNN's.
SOFTWARE = {"2022": "2022", "2022-23": "2022-23", "2023-25": "2023-25"}
TODAY = "2023-26"
# What a profile's shares, which are of today's software, were with earlier software: `planner.py
# --fit` prints them. The rest is as the profile has it.
_2022 = {"matrix_efficiency": 0.697, "attention_efficiency": 0.139}
_2023 = {"attention_efficiency": 0.27, "memory_efficiency": 0.34}
_2023 |= {"overlap": 0.806, "straggler_share": 0.016}
EARLIER: dict[tuple[str, str], dict[str, float]] = {
    ("2022", "p4d"): _2022,
    ("2022", "p4de"): _2022,
    ("2022-23", "p4d"): {**_2023, "matrix_efficiency": 0.808, "memory_efficiency": 0.446},
    ("2022-23", "p4de"): {**_2023, "matrix_efficiency": 0.937},
    ("2022-23", "p5"): {**_2023, "matrix_efficiency": 0.8, "attention_efficiency": 0.15},
}
PRECISIONS = get_args(TrainConfig.model_fields["precision"].annotation)

# A device's clock, which goes as the cube root of its dynamic power, gives its peak.
_H100_TFLOPS, _H100_WATTS = 989.5, 700

_RECIPES = {"gpt3": "gpt3_125m", "neox": "pythia_160m", "llama": "llama2_7b"}


class Shape(NamedTuple):
    """A model, as overrides of a recipe of its family."""

    recipe: str
    layers: int
    overrides: list[str]


def _shape(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> Shape:
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
        "vocab_pad_multiple": 256,
    }
    overrides = [f"model.{name}={size}" for name, size in sizes.items()]
    return Shape(_RECIPES[family], layers, overrides)


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 50257) -> Shape:
    return _shape("gpt3", layers, hidden, heads, heads, 4 * hidden, vocab)


def _neox(layers: int, hidden: int, heads: int) -> Shape:
    return _shape("neox", layers, hidden, heads, heads, 4 * hidden, 50257)


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int = 32000) -> Shape:
    return _shape("llama", layers, hidden, heads, kv, ffn, vocab)


def _nemotron(layers: int, hidden: int, heads: int) -> Shape:
    """Nemotron 4: a gated layer stands for its relu², of as many weights, FLOPs and bytes."""
    return _llama(layers, hidden, heads, 8, 8 * hidden // 3, 256000)


def _tied(shape: Shape) -> Shape:
    return shape._replace(overrides=[*shape.overrides, "model.tied_embeddings=true"])


# Llama 1 to 3: their papers and config.json; GPT-3: Brown et al. 2020, table 2.1, and
# neuronx-nemo-megatron's gpt_23b.sh, gpt_46b.sh; MPT: llm-foundry's mcli and throughput configs;
# Llama 2 34B: fms-fsdp's config_utils.py; InternLM: InternEvo's 7B_sft.py; Nemotron 4: NeMo's
# nemotron.py; 22B to 1T: Korthikanti et al. 2022, table 3; BLOOM: its preliminary runs, hidden size
# × layers and heads, with ALiBi. GPT-2: llm.c and modded-nanogpt's logs; GPT-3 of other sizes:
# FlashAttention's training/configs, FlagPerf's gpt3_6.7B, NeMo's launcher; Baichuan 2 and Qwen:
# their config.json; KempnerForge, nanotron: the scripts of their benchmarks.
SHAPES = {
    "Pythia-6.9B": _neox(32, 4096, 32),
    "GPT-NeoX-20B": _neox(44, 6144, 64),
    "GPT-NeoX-6.9B": _neox(32, 4096, 32),
    "GPT3-6.7B": _gpt(32, 4096, 32),
    "GPT3-23B": _gpt(28, 8192, 64),
    "GPT3-46B": _gpt(56, 8192, 64),
    "GPT3-175B": _gpt(96, 12288, 96),
    "Llama-2-7B": _llama(32, 4096, 32, 32, 11008),
    "HLAT-7B": _llama(32, 4096, 32, 32, 11008),
    "Llama-2-13B": _llama(40, 5120, 40, 40, 13824),
    "Llama-2-70B": _llama(80, 8192, 64, 8, 28672),
    "HLAT-70B": _llama(80, 8192, 64, 8, 28672),
    "Llama-3-8B": _llama(32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-8B": _llama(32, 4096, 32, 8, 14336, 128256),
    "Llama-3-70B": _llama(80, 8192, 64, 8, 28672, 128256),
    "Llama-3.1-70B": _llama(80, 8192, 64, 8, 28672, 128256),
    "Llama-3.1-405B": _llama(126, 16384, 128, 8, 53248, 128256),
    "GPT3-1.3B": _gpt(24, 2048, 16),
    "Llama-1.1B": _llama(22, 2048, 32, 4, 5632),  # TinyLlama: Zhang et al. 2024, arXiv 2401.02385
    "MPT-125m": _gpt(12, 768, 12, 50368),
    "MPT-350m": _gpt(24, 1024, 16, 50368),
    "MPT-760m": _gpt(24, 1536, 12, 50368),
    "MPT-7b": _gpt(32, 4096, 32, 50368),
    "MPT-13b": _gpt(40, 5120, 40, 50368),
    "MPT-70b": _gpt(80, 8192, 64, 50368),
    "MPT-1b": _gpt(24, 2048, 16, 50368),
    "MPT-3b": _gpt(32, 2560, 20, 50368),
    "MPT-30b": _gpt(48, 7168, 56, 50368),
    "GPT3-5B": _gpt(24, 4096, 32),
    "GPT-22B": _gpt(48, 6144, 64),
    "MT-NLG-530B": _gpt(105, 20480, 128),
    "GPT-1T": _gpt(128, 25600, 160),
    "Llama-2-34B": _llama(48, 8192, 64, 8, 22016),
    "InternLM-7B": _llama(32, 4096, 32, 32, 11008, 103168),
    "Nemotron-4-15B": _nemotron(32, 6144, 48),
    "Nemotron-4-340B": _nemotron(96, 18432, 96),
    "GPT2-124M": _gpt(12, 768, 12),
    "GPT2-124M-h6": _gpt(12, 768, 6),
    "GPT2-1.5B-52": _gpt(52, 1536, 12),
    "GPT3-125M": _gpt(12, 768, 12),
    "GPT3-355M": _gpt(24, 1024, 16),
    "GPT3-760M": _gpt(24, 1536, 16),
    "GPT3-2.7B": _gpt(32, 2560, 20),
    "GPT3-20B": _gpt(44, 6144, 48),
    "GPT3-40B": _gpt(48, 8192, 64),
    "GPT3-13B-h128": _gpt(40, 5120, 128),
    "Baichuan2-7B": _llama(32, 4096, 32, 32, 11008, 125696),
    "Qwen-7B": _llama(32, 4096, 32, 32, 11008, 151936),
    "KempnerForge-15B": _llama(40, 5120, 40, 8, 17920, 128256),
    "KempnerForge-29B": _llama(56, 6144, 48, 8, 21504, 128256),
    "Nanotron-1.3B": _tied(_llama(16, 2048, 32, 32, 8192, 131072)),
    "Nanotron-3.6B": _tied(_llama(28, 3072, 32, 32, 8192, 131072)),
    "Nanotron-8.9B": _llama(32, 4096, 32, 32, 14336, 131072),
    "Nanotron-80B": _llama(80, 8192, 64, 64, 28672, 131072),
    **{
        f"BLOOM-{hidden}x{layers}-h{heads}": _gpt(layers, hidden, heads, 250880)
        for hidden, layers in ((14336, 72), (13824, 78), (13312, 84), (12288, 96))
        for heads in (64, 96, 112, 128)
    },
}


@dataclass(frozen=True)
class Row:
    """One published run."""

    name: str
    model: str
    hardware: str
    config: RunConfig
    mesh: Mesh
    measured: float  # sequences a second, of all nodes
    source: str
    generation: str  # years of its software
    precision: str  # of the recipe
    network_is_stated: bool  # by the source; else the profile's
    gradients: str  # as workers sum them: bf16 or fp32; empty: not known
    group: str  # repository and model
    half: str  # fit, held_out or fresh; empty: of published_gpu.csv and published_trn1.csv
    trainer: Trainer

    @property
    def software(self) -> str:
        """Years of software that constants are fitted for together."""
        return SOFTWARE.get(self.generation, TODAY)

    @property
    def publisher(self) -> str:
        """Repository or site."""
        words = self.source.removeprefix("github ").replace("@", " ").split()
        return self.group.partition(" ")[0] or words[0]


def table(file: str) -> list[dict[str, str]]:
    """A file in `published/`."""
    with (FOLDER / file).open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def rows(file: str) -> Iterator[Row]:
    """The rows of a file, those that no recipe can express left out."""
    for row in table(file):
        if row["cp"] == "1" and precision(row["precision"].lower()) in PRECISIONS:
            yield _row(row)


def halves(written: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The half of each row: in the order of groups, and of hashes in one, every second is held out.

    So both halves have rows of every group of two, whatever was predicted of them.
    """
    by_hash = sorted(written, key=lambda row: (row["group"], sha256(row["id"].encode()).digest()))
    return {row["id"]: ("fit", "held_out")[place % 2] for place, row in enumerate(by_hash)}


def _row(row: dict[str, str]) -> Row:
    seq_len, nodes = int(row["seq_len"]), int(row["nodes"])
    tensor, pipeline, data = (int(row[name]) for name in ("tp", "pp", "dp"))
    cluster, hardware = _cluster(row)
    mesh_overrides = (f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}")
    overrides = [*hardware, *recipe_overrides(row), *mesh_overrides]
    config = configuration(row["model"], seq_len, cluster, overrides)
    per_node = tensor * pipeline * data // nodes
    batches = int(row["global_batch"]), int(row["microbatch"])
    chunks, copies = (int(row.get(name) or 1) for name in ("virtual_pipeline", "replicate"))
    degrees = nodes, per_node, tensor, pipeline, data
    mesh = Mesh(*degrees, *batches, virtual_pipeline=chunks, replicate=copies)
    measured = float(row["throughput_value"])
    if row["throughput_unit"].startswith("tokens/s"):
        measured /= seq_len
    origin = row["source"], row["generation"], config.recipe.train.precision
    gradients, group, half = (row.get(name, "") for name in ("gradients", "group", "half"))
    shown = row["id"], row["model"], row["hardware"], config, mesh, measured, *origin
    return Row(*shown, bool(network(row)), gradients, group, half, trainer(row))


def trainer(row: dict[str, str]) -> Trainer:
    """What the source states of the trainer."""
    in_bf16 = row.get("gradients") == "bf16" or "mp_mode PURE" in row["notes"]
    overlaps = "TP communication overlapped" in row["notes"]
    # InternEvo@34fc28d, internlm/solver/optimizer/hybrid_zero_optim.py and modeling_internlm.py.
    is_intern = row.get("group", "").startswith("InternLM/")
    tensors = 9 * SHAPES[row["model"]].layers + 3 if is_intern else 0
    # Megatron Core's default: megatron/core/distributed/distributed_data_parallel_config.py.
    bucket = max(40_000_000, 1_000_000 * int(row["dp"])) if overlaps else 1
    return Trainer(2 if in_bf16 else 0, overlaps, bucket, tensors)


def recipe_overrides(row: dict[str, str]) -> list[str]:
    return [
        f"train.global_batch={row['global_batch']}",
        f"train.micro_batch={row['microbatch']}",
        f"train.precision={precision(row['precision'].lower())}",
        f"train.activation_checkpointing={_checkpointing(row['activation_ckpt'])}",
        f"parallel.sequence={'true' if row['sequence_parallel'] == 'yes' else 'false'}",
        f"parallel.zero={zero_stage(row['zero1'])}",
        f"train.compile={'false' if 'without torch.compile' in row['notes'] else 'true'}",
    ]


def configuration(model: str, seq_len: int, cluster: str, overrides: list[str]) -> RunConfig:
    shape = SHAPES[model]
    steps = ("train.steps=10000", "optim.warmup_steps=10", f"model.seq_len={seq_len}")
    return resolve(shape.recipe, cluster, [*steps, *shape.overrides, *overrides])


def _cluster(row: dict[str, str]) -> tuple[str, list[str]]:
    """The profile, and what of it was otherwise."""
    hardware = row["hardware"]
    kinds = {"trn1": "trn1", "H100": "p5", "H200": "p5e", "B200": "p6-b200"}
    a100 = "p4de" if "80GB" in hardware else "p4d"
    profile = next((name for kind, name in kinds.items() if hardware.startswith(kind)), a100)
    software = SOFTWARE.get(row["generation"], TODAY)
    stated = {"network_gb_s": network(row), "memory_gb_s": row.get("memory_gb_s")}
    stated |= {name: str(value) for name, value in EARLIER.get((software, profile), {}).items()}
    stated |= {"software": "" if profile == "trn1" else f"'{software}'"}
    if (watts := re.search(r"(\d+) W\b", row["notes"])) and profile == "p5":
        slower = (int(watts[1]) / _H100_WATTS) ** (1 / 3)
        stated |= {"bf16_tflops": f"{_H100_TFLOPS * slower:.1f}"}
        stated |= {"fp8_tflops": f"{2 * _H100_TFLOPS * slower:.1f}"}
    return profile, [f"cluster.hardware.{name}={value}" for name, value in stated.items() if value]


def network(row: dict[str, str]) -> str:
    """GB/s of a node, where the source states it."""
    if "half" in row or not row["hardware"].startswith("A100"):
        return row.get("network_gb_s", "")
    # llm-foundry's: "1600 Gbps node-node interconnect (RoCE)".
    return "100" if row["hardware"].endswith("800 Gbit/s") else "200"


def precision(cell: str) -> str:
    if "fp8" in cell:
        return "fp8_mixed"
    if "sr fp32 opt" in cell:
        return "bf16_mixed"
    if "bf16sr" in cell or "stochastic" in cell or "pure bf16" in cell:
        return "bf16_sr"
    if "use_fp32_optimizer 0" in cell or cell == "bf16":
        return "bf16"
    return "bf16_mixed"


def _checkpointing(cell: str) -> str:
    if cell.startswith("["):
        return cell
    if "MLP)" in cell:  # CoreAttention and the feed-forward layer
        return "[core, mlp]"
    return next((mode for mode in ("full", "selective") if mode in cell.lower()), "none")


def zero_stage(cell: str) -> int:
    """Of the column `zero1`: a stage, or the name of a sharding strategy of PyTorch's FSDP."""
    names = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3}
    stages = [stage for name, stage in names.items() if name in cell.upper()]
    return stages[0] if stages else int(cell or 0)


@lru_cache
def chosen_meshes() -> frozenset[tuple[str, int, int]]:
    """(model, tensor, pipeline) of AWS's recipes that ran."""
    return frozenset(
        (row["model"].partition(" (")[0], int(row["tp"]), int(row["pp"].split()[0]))
        for row in table("chosen_meshes.csv")
        if row["pp"] != "?"
    )
