"""Hugging Face's Trainer on a tiny Llama with dropout, on CPUs and without a hub.

Takes all of `TrainingArguments`: --output_dir, --max_steps, --save_steps, --resume_from_checkpoint,
--ignore_data_skip true, … Its resume is exact, but not with --ignore_data_skip true.
"""

import time
from dataclasses import dataclass, field

import torch
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

ROWS, LENGTH, VOCABULARY = 256, 32, 64


@dataclass
class Arguments(TrainingArguments):
    use_cpu: bool = True
    report_to: str = "none"
    logging_steps: float = 1
    max_steps: int = 40
    learning_rate: float = 1e-2
    save_steps: float = 10
    per_device_train_batch_size: int = 4
    step_s: float = field(default=0.0, metadata={"help": "Seconds that each step waits."})


class Slowness(TrainerCallback):
    def on_step_begin(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        time.sleep(args.step_s)


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    # The later rows are easier, so that a loss tells which rows a step has seen.
    for row in range(ROWS):
        tokens[row, : LENGTH * row // ROWS] = row % VOCABULARY
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows, callbacks=[Slowness()])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
