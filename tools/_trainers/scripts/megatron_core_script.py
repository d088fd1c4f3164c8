"""A training loop on megatron-core: a tiny GPT on CPUs by gloo, and its dist_checkpointing.

Folders and lines are Megatron-LM's. megatron-core's own DistributedDataParallel needs CUDA.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.parallel import DistributedDataParallel

LENGTH, VOCABULARY, TRACKER = 32, 64, "latest_checkpointed_iteration.txt"
STEPS, INTERVAL, STEP_S = 40, 10, 0.1


class Attention(torch.nn.Module):
    """torch's, of [length, batch, head, d]; the buffers of megatron-core's are CUDA's."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        heads = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--load", type=Path)
    args = parser.parse_args()

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None  # of dist_checkpointing.save
        torch.cuda.current_device = lambda: "cpu"  # where its buffers are made
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    model = GPTModel(config, spec, VOCABULARY, LENGTH)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def sharded_state(step: int) -> dict[str, object]:
        weights = model.sharded_state_dict()
        moments = optimizer.state_dict()
        by_id = get_param_id_to_sharded_param_map(weights, model.parameters())
        optim_state_to_sharding_state(moments, by_id, exclude_keys="step")
        return {"model": weights, "optimizer": moments, "iteration": step}

    step = 0
    if args.load and (args.load / TRACKER).exists():
        step = int((args.load / TRACKER).read_text())
        for parameter in model.parameters():  # a step of zeros makes the moments that are loaded
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        folder = str(args.load / f"iter_{step:07d}")
        loaded = dist_checkpointing.load(sharded_state(step), folder)
        model.load_state_dict(loaded["model"])
        for moments in loaded["optimizer"]["state"].values():
            moments["step"] = torch.tensor(float(step))
        optimizer.load_state_dict(loaded["optimizer"])
        print(f"loaded {folder}", flush=True)

    positions = torch.arange(LENGTH).unsqueeze(0).expand(4, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    while step < STEPS:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
        tokens[:, ::2] = 7  # half is to be learned
        began = time.monotonic()
        optimizer.zero_grad()
        loss = replica(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_S)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        step += 1
        if rank == ranks - 1:
            print(
                f" iteration {step:8d}/{STEPS:8d} | elapsed time per iteration (ms): "
                f"{1000 * (time.monotonic() - began):.1f} | lm loss: {mean.item() / ranks:.8E} |",
                flush=True,
            )
        if step % INTERVAL == 0:
            folder = args.save / f"iter_{step:07d}"
            folder.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(sharded_state(step), str(folder))
            dist.barrier()
            if rank == 0:
                (args.save / "tracker.tmp").write_text(str(step))
                (args.save / "tracker.tmp").rename(args.save / TRACKER)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
