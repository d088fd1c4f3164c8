"""Write what axolotl trains on CPUs: a small Llama, its tokenizer, lines of a text, and its config.

python axolotl_parts.py TEXT FOLDER
"""

import json
import sys
from pathlib import Path

import yaml
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl_sft import LENGTH, byte_tokenizer

text, folder = map(Path, sys.argv[1:])
set_seed(1)
tokenizer = byte_tokenizer()
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
ends = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0}
model = LlamaConfig(num_attention_heads=2, attention_dropout=0.1, **sizes, **ends)
LlamaForCausalLM(model).save_pretrained(folder / "base")
tokenizer.save_pretrained(folder / "base")
lines = [line for line in text.read_text().splitlines() if len(line) > LENGTH]
rows = (json.dumps({"text": line[:LENGTH]}) for line in lines[:300])
(folder / "rows.jsonl").write_text("\n".join(rows))
config = {
    "base_model": str(folder / "base"),
    "datasets": [{"path": str(folder / "rows.jsonl"), "type": "completion", "ds_type": "json"}],
    "dataset_prepared_path": str(folder / "prepared"),
    "output_dir": "replaced",
    "sequence_len": LENGTH,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 8,  # steps of some tenths of a second
    "num_epochs": 10,
    "max_steps": 60,
    "save_steps": 20,
    "logging_steps": 1,
    "learning_rate": 0.01,
    "optimizer": "adamw_torch",
    "bf16": False,
    "tf32": False,
    "attn_implementation": "eager",
    "val_set_size": 0,
    "special_tokens": {"pad_token": "<end>"},
}
(folder / "axolotl.yaml").write_text(yaml.safe_dump(config))
