"""Model, tokenizer and rows of a tiny torchtune recipe for CPUs; as a script, its base weights."""

import sys
import time

import torch
from torch.utils.data import Dataset
from torchtune import training
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerDecoder

VOCABULARY, LENGTH, ROWS, STEP_S = 64, 32, 80, 0.025

if not torch.cuda.is_available():  # The recipe calls two functions that know no CPU.
    training.cleanup_before_training = lambda: None
    sizes = ("peak_memory_active", "peak_memory_alloc", "peak_memory_reserved")
    training.get_memory_stats = lambda *_, **__: dict.fromkeys(sizes, 0.0)


class Tokenizer:
    """Rows are tokens already."""

    pad_id = 0


class Rows(Dataset):
    """Random tokens, of which half are one; reading a row takes STEP_S."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
        rows[:, ::2] = 7
        self.rows = rows.tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        time.sleep(STEP_S)
        return {"tokens": self.rows[index], "labels": self.rows[index]}


def model() -> TransformerDecoder:
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 32}
    return llama2(vocab_size=VOCABULARY, max_seq_len=LENGTH, **sizes)


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.save(model().state_dict(), sys.argv[1])
