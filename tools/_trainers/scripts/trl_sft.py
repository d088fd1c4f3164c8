"""TRL's SFTTrainer on a tiny Llama and lines of a text, on CPUs and without a hub.

Takes all of `SFTConfig`: --output_dir, --max_steps, --save_steps, --resume_from_checkpoint, …
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

LENGTH = 48


@dataclass
class Arguments(SFTConfig):
    """SFTConfig, with the text and a wait."""

    text: str = ""  # a file
    use_cpu: bool = True
    bf16: bool = False
    report_to: str = "none"
    logging_steps: float = 1
    max_steps: int = 30
    learning_rate: float = 1e-2
    save_steps: float = 10
    per_device_train_batch_size: int = 4
    gradient_checkpointing: bool = False
    max_length: int = LENGTH
    step_s: float = field(default=0.0, metadata={"help": "Seconds that each step waits."})


class Slowness(TrainerCallback):
    """Steps that take longer."""

    def on_step_begin(self, args: Arguments, state: object, control: object, **_: object) -> None:
        time.sleep(args.step_s)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{letter: 1 + index for index, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {f"{name}_token": "<end>" for name in ("eos", "pad")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=0,
    )
    lines = [line for line in Path(args.text).read_text().splitlines() if len(line) > LENGTH]
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args,
        train_dataset=Dataset.from_dict({"text": lines[:300]}),
        processing_class=tokenizer,
        callbacks=[Slowness()],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
