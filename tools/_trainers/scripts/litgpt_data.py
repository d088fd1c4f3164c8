"""Write a text's bytes as the chunks that litgpt's TextFiles makes with a tokenizer."""

import sys
from functools import partial
from pathlib import Path

import torch
from litdata import optimize
from litdata.streaming import TokensLoader

LENGTH = 65  # of a sequence and the next token


def tokens_of(piece: bytes, _: None = None) -> torch.Tensor:
    return torch.tensor(list(piece), dtype=torch.int)


if __name__ == "__main__":
    source, folder = map(Path, sys.argv[1:])
    content = source.read_bytes()
    half = len(content) // 2
    for name, piece in (("train", content[:half]), ("val", content[half:])):
        if not (folder / name).is_dir():
            optimize(
                fn=partial(tokens_of),
                inputs=[piece],
                output_dir=str(folder / name),
                num_workers=1,
                chunk_bytes="50MB",
                item_loader=TokensLoader(block_size=LENGTH),
            )
