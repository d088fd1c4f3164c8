"""OLMo-core's Trainer as its src/examples/llm/train.py builds it, tiny, on CPUs.

Bookkeeping and saves are synchronous: with asynchronous ones of 3.0.0, on gloo alone, both ranks
waited forever after the last step (`reduce_metrics`; with that one off, after the last save).
"""

import argparse
import time
from dataclasses import dataclass

from olmo_core.config import DType
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import (
    Duration,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig
from olmo_core.utils import seed_all

LENGTH = 32


@dataclass
class Slowness(Callback):
    """Steps that take longer."""

    step_s: float = 0.0

    def pre_step(self, batch: object) -> None:
        time.sleep(self.step_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-folder", required=True)
    parser.add_argument("--text", required=True)  # its bytes are the tokens
    parser.add_argument("--work", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.0)
    args = parser.parse_args()
    seed_all(1)
    tokenizer = TokenizerConfig(vocab_size=256, eos_token_id=0, pad_token_id=1)
    # The smallest of its families, of 190M and fewer parameters: `olmo2_1M`.
    model = TransformerConfig.olmo2_1M(vocab_size=256).build(init_device="meta")
    train_module = TransformerTrainModuleConfig(
        rank_microbatch_size=4 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=1e-2),
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType.fsdp, param_dtype=DType.float32, reduce_dtype=DType.float32
        ),
        max_grad_norm=1.0,
        scheduler=CosWithWarmup(warmup_steps=5),
    ).build(model)
    dataset = NumpyFSLDatasetConfig(
        paths=[args.text], sequence_length=LENGTH, tokenizer=tokenizer, work_dir=args.work
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=8 * LENGTH, seed=0).build(
        dataset, dp_process_group=train_module.dp_process_group
    )
    trainer = (
        TrainerConfig(
            save_folder=args.save_folder,
            save_overwrite=True,
            max_duration=Duration.steps(args.steps),
            metrics_collect_interval=1,
            async_bookkeeping=False,
            cancel_check_interval=5,
        )
        .with_callback("checkpointer", CheckpointerCallback(save_interval=10, save_async=False))
        .with_callback("slowness", Slowness(step_s=args.step_s))
        .build(train_module, loader)
    )
    trainer.maybe_load_checkpoint()
    trainer.fit()


if __name__ == "__main__":
    prepare_training_environment(backend="gloo")  # not NCCL too, without GPUs
    main()
    teardown_training_environment()
