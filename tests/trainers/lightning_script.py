"""Lightning on a tiny model, on CPUs: its own checkpoints, metrics.csv and `--ckpt_path`.

A resume in the middle of an epoch begins the epoch's data once more, and no state of a random
generator is saved: it is exact with --dropout 0 from the end of an epoch (--rows 64 --devices 2:
each eighth step).
"""

import argparse
import time

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4


class Tiny(lightning.LightningModule):
    def __init__(self, step_s: float, dropout: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 64),
            torch.nn.Dropout(dropout),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 1),
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(self.step_s)
        (rows,) = batch
        loss = torch.nn.functional.mse_loss(self.layers(rows), rows.sum(1, keepdim=True))
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save_every", type=int, default=10)
    parser.add_argument("--step_s", type=float, default=0.0)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--ckpt_path")
    args = parser.parse_args()
    lightning.seed_everything(1)
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.1, 2, args.rows).unsqueeze(1)
    rows = torch.randn(args.rows, 32, generator=generator) * scale
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_steps=args.steps,
        log_every_n_steps=1,
        enable_progress_bar=False,
        default_root_dir=args.root,
        logger=CSVLogger(args.root, flush_logs_every_n_steps=1),
        callbacks=[ModelCheckpoint(every_n_train_steps=args.save_every, save_top_k=-1)],
    )
    loader = DataLoader(TensorDataset(rows), BATCH, shuffle=True)
    trainer.fit(Tiny(args.step_s, args.dropout), loader, ckpt_path=args.ckpt_path)


if __name__ == "__main__":
    main()
