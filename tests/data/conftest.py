import json
import random
from pathlib import Path

import pytest

from slurmllm.data.corpus.build import build_corpus
from slurmllm.data.corpus.inputs import find_inputs
from slurmllm.data.corpus.readers import ReadOptions
from slurmllm.data.tokenizer import train_tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"


def shared_file(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"needs the real text {name}, which is not part of the project")
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def make_corpus(folder: Path, texts: list[str], name: str = "corpus") -> Path:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = folder / f"{name}.arrow"
    build_corpus(find_inputs([str(source)]), out, ReadOptions(), overwrite=True)
    return out


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Documents of 1 to 60 words, each beginning with its own number."""
    rng = random.Random(seed)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    words += ["–", "größer,", "naïve", "東京", "<unk>", "3.14"]
    return [f"{i}: {' '.join(rng.choices(words, k=rng.randint(1, 60)))}\n" for i in range(count)]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return some_texts(97)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), texts)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(texts, 320))
    return path


@pytest.fixture(scope="session")
def wikitext() -> Path:
    return shared_file("wikitext-2/valid.txt")


@pytest.fixture(scope="session")
def gpt2() -> Path:
    return shared_file("gpt2.tokenizer.json")
