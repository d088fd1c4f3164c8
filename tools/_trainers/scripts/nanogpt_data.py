"""Write a text as nanoGPT's data/shakespeare_char/prepare.py does: train.bin, val.bin, meta.pkl."""

import pickle
import sys
from pathlib import Path

import numpy as np

source, folder = map(Path, sys.argv[1:])
folder.mkdir(parents=True, exist_ok=True)
tokens = np.frombuffer(source.read_bytes(), dtype=np.uint8).astype(np.uint16)
count = len(tokens)
for name, rows in (("train", tokens[: count * 9 // 10]), ("val", tokens[-count // 10 :])):
    rows.tofile(folder / f"{name}.bin")
(folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
