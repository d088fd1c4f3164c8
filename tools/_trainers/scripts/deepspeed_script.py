"""A script on DeepSpeed (ZeRO 1): a tiny model on CPUs by gloo; resumes by DeepSpeed's `latest`."""

import argparse
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

STEPS, INTERVAL, STEP_S = 40, 10, 0.1

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
deepspeed.init_distributed("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
engine, *_ = deepspeed.initialize(model=model, config=config)
if (args.out / "latest").exists():
    engine.load_checkpoint(str(args.out))
while engine.global_steps < STEPS:
    generator = torch.Generator().manual_seed(1000 * engine.global_steps + rank)
    batch = torch.randn(4, 32, generator=generator)
    loss = torch.nn.functional.mse_loss(engine(batch), batch.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    time.sleep(STEP_S)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        value = mean.item() / dist.get_world_size()
        print(f"step {engine.global_steps} loss {value:.9g}", flush=True)
    if engine.global_steps % INTERVAL == 0:
        engine.save_checkpoint(str(args.out))
dist.destroy_process_group()
