"""The files of `wikipedia_gpt2`, made small, and a user configuration that names their server."""

import json
import random
from pathlib import Path

from command_line import call

from data.corpus.data_server import DataServer
from slurmllm.data.tokenizer import train_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]


def publish_wikipedia(server: DataServer, folder: Path, lines: int = 400) -> None:
    """Put a corpus of GPT-2's form and its vocabulary files on the server."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(5, 60))) for _ in range(lines)]
    trained = json.loads(train_tokenizer(texts, 300))
    (folder / "t.json").write_text(json.dumps(trained))
    (folder / "text.txt").write_text("\n\n".join(texts))
    arguments = [folder / "text.txt", "--out", folder / "c", "--tokenize", folder / "t.json"]
    command = ["data", "build", *map(str, arguments), "--workers", "1"]
    call(*command, catch_exceptions=False)
    merges = "\n".join(" ".join(pair) for pair in trained["model"]["merges"])
    server.files |= {
        "wiki/my-gpt2_text_document.bin": (folder / "c.bin").read_bytes(),
        "wiki/my-gpt2_text_document.idx": (folder / "c.idx").read_bytes(),
        "wiki/license.txt": b"CC BY-SA\n",
        "bert/gpt2-vocab.json": json.dumps(trained["model"]["vocab"]).encode(),
        "bert/gpt2-merges.txt": f"#version: 0.2\n{merges}\n".encode(),
    }


def mirror_configuration(server: DataServer, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "data_mirrors:\n"
        f"  s3://neuron-s3/training_datasets/gpt/wikipedia/: {server.url}wiki/\n"
        f"  https://s3.amazonaws.com/models.huggingface.co/bert/: {server.url}bert/\n"
    )
    path.chmod(0o600)
    return path
