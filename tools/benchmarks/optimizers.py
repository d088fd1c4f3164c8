"""The loss of Muon and of AdamW after equal steps: the same model, text, batches and seeds.

    python tools/benchmarks/optimizers.py [--data ../shared/data] [--steps 120] [--seeds 1 2 3]
        [--json]

Model, vocabulary size and schedule are those of the recipe tiny_llama, the text is Wikipedia's
(WikiText-2), with a tokenizer that is trained on it. A run reads less than half of it: no token is
read twice, so that the training loss of a step is a loss on text that the model has not seen. The
figure of a run is the mean loss of the last 20 steps; all runs of a seed have the same initial
weights and batches.

AdamW: the recipe's learning rate, half and twice. Muon: the plugin of docs/examples, with the
published settings of Liu et al. (arXiv 2502.16982: AdamW's learning rate and weight decay, updates
scaled to AdamW's), and of Jordan (kellerjordan.github.io/posts/muon: 0.02, AdamW on the rest; there
with AdamW's learning rate of the recipe).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from slurmllm.backends.base import MicroBatch, Worker, load_backend
from slurmllm.config.resolve import RunConfig, resolve
from slurmllm.corpus.build import build_corpus
from slurmllm.corpus.inputs import find_inputs
from slurmllm.corpus.readers import ReadOptions
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import PackedStream
from slurmllm.data.tokenizer import train_tokenizer
from slurmllm.display.tables import print_table
from slurmllm.model.decoder import build_model
from slurmllm.plan.mesh import make_mesh
from slurmllm.plugins import register
from slurmllm.train.schedules import learning_rate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "slurmllm_muon" / "src"
LAST = 20
MUON = ("optim.name=muon",)
CONTESTANTS: dict[str, tuple[str, ...]] = {
    "adamw, lr 1e-3": ("optim.lr=1e-3", "optim.min_lr=1e-4"),
    "adamw, lr 2e-3 (recipe)": (),
    "adamw, lr 4e-3": ("optim.lr=4e-3", "optim.min_lr=4e-4"),
    "muon, Liu et al., lr 2e-3": (*MUON, "optim.settings.adjust_lr=match_rms_adamw"),
    "muon, Jordan, lr 0.02": (
        *MUON, "optim.lr=0.02", "optim.min_lr=2e-3", "optim.settings.adamw_lr=2e-3",
    ),
}  # fmt: skip


def main() -> None:
    """Train all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = options.data / "wikitext-2/valid.txt"
    if not text.is_file():
        print(f"skipped: {text} is not there; name its folder in --data")
        return
    sys.path.insert(0, str(EXAMPLE))
    from slurmllm_muon.muon import MuonAdamW  # type: ignore[import-not-found]

    register("optimizers", "muon")(MuonAdamW)
    losses: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        corpus, tokenizer = Path(folder) / "corpus.arrow", Path(folder) / "tokenizer.json"
        tokenizer.write_text(train_tokenizer([text.read_text()], 4096))
        build_corpus(find_inputs([str(text)]), corpus, ReadOptions())
        for seed in options.seeds:
            for name, settings in CONTESTANTS.items():
                config = resolve(
                    "tiny_llama", "local",
                    [
                        *("train.micro_batch=8", "train.compile=false"),
                        *(f"train.steps={options.steps}", f"train.seed={seed}", *settings),
                    ],
                )  # fmt: skip
                losses[name].append(train(config, corpus, tokenizer))
                print(f"seed {seed}  {name}  {losses[name][-1]:.4f}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"steps": options.steps, "seeds": options.seeds, "losses": losses}))
        return
    rows = (
        (name, *(f"{loss:.4f}" for loss in found), f"{statistics.mean(found):.4f}")
        for name, found in losses.items()
    )
    print_table(("optimizer", *(f"seed {seed}" for seed in options.seeds), "mean"), rows)


def train(config: RunConfig, corpus: Path, tokenizer: Path) -> float:
    """Train on one worker; return the mean loss of the last steps."""
    recipe = config.recipe
    spec = StreamSpec(
        [(corpus, 1.0)], tokenizer, recipe.model.seq_len, recipe.train.global_batch,
        recipe.train.seed, recipe.model.vocab_size,
    )  # fmt: skip
    backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 1, 0, "here"))
    backend.start()
    losses = []
    try:
        backend.build(lambda: build_model(recipe.model))
        backend.build_optimizer()
        with PackedStream(spec, 0, 1) as stream:
            for step in range(1, recipe.train.steps + 1):
                batch = stream.next_batch()
                micro = MicroBatch(batch.inputs, batch.labels(-100), batch.positions)
                losses.append(float(backend.forward_backward([micro], batch.inputs.size)))
                backend.optimizer_step(learning_rate(recipe.optim, recipe.train.steps, step))
    finally:
        backend.stop()
    return statistics.mean(losses[-LAST:])


if __name__ == "__main__":
    main()
