"""Composer on a tiny model with dropout, on CPUs by gloo; resumes from --load_path."""

import argparse
import time

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist, reproducibility
from torch.utils.data import DataLoader, TensorDataset

STEPS, INTERVAL, STEP_S, ROWS = 40, 10, 0.1, 256


class Tiny(ComposerModel):
    """Learns the sum of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(STEP_S)
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[0].sum(1, keepdim=True))


parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--load_path")
args = parser.parse_args()
reproducibility.seed_all(1)
model = Tiny()
scale = torch.linspace(0.1, 2, ROWS).unsqueeze(1)
rows = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1)) * scale
dataset = TensorDataset(rows)
Trainer(
    model=model,
    train_dataloader=DataLoader(dataset, 4, sampler=dist.get_sampler(dataset, shuffle=True)),
    optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
    max_duration=f"{STEPS}ba",
    device="cpu",
    seed=1,
    save_folder=args.out,
    save_interval=f"{INTERVAL}ba",
    save_overwrite=True,
    load_path=args.load_path,
    load_progress_bar=False,
    progress_bar=False,
    log_to_console=True,
    console_log_interval="1ba",
).fit()
