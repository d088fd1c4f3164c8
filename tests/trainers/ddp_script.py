"""A training script that knows nothing of slurmllm: DDP on gloo, one checkpoint in N steps."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--first-batches", action="store_true")  # a resume that forgets its position
args = parser.parse_args()

alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
os.environ.update({} if "RANK" in os.environ else alone)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
replica = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

step = 0
checkpoints = sorted(args.out.glob("step_*.pt"))
if checkpoints:
    state = torch.load(checkpoints[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    print(f"resumed from {checkpoints[-1]}", flush=True)

first = step if args.first_batches else 0
while step < args.steps:
    step += 1
    generator = torch.Generator().manual_seed(1000 * (step - first) + rank)
    batch = torch.randn(16, 32, generator=generator)
    loss = torch.nn.functional.mse_loss(replica(batch), batch.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(args.step_s)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item() / dist.get_world_size():.9g}", flush=True)
    if step % args.save_every == 0 and rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, args.out / "half.tmp")
        (args.out / "half.tmp").rename(args.out / f"step_{step:06d}.pt")
dist.destroy_process_group()
