"""The same seed gives the same weights, however many workers share them out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from train.gang import Gang, make_data, make_run

from slurmllm.config.resolve import load
from slurmllm.model.decoder import build_model
from slurmllm.model.init import initialize

_ENTRY = """
import hashlib, json, os, sys
from pathlib import Path
from slurmllm.backends.base import Worker, load_backend
from slurmllm.config.resolve import load
from slurmllm.model.decoder import build_model
from slurmllm.plan.mesh import make_mesh
run, rank = Path(sys.argv[1]), int(os.environ["RANK"])
config = load(run / "config.yaml")
backend = load_backend("native")(config, make_mesh(config, 1), Worker(rank, 3, rank, "node"))
backend.start()
backend.build(lambda: build_model(config.recipe.model))
whole = {name: p.full_tensor() for name, p in backend.model.named_parameters()}
sums = {n: hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for n, t in whole.items()}
(run / f"sums_{rank}.json").write_text(json.dumps(sums))
backend.stop()
"""


def test_three_workers_and_one(tmp_path: Path) -> None:
    # 3 divides neither the vocabulary nor the widths: shards of unequal sizes.
    overrides = ("cluster.devices_per_node=3", "train.global_batch=6", "train.micro_batch=1")
    run = make_run(tmp_path / "run", make_data(tmp_path), *overrides)
    Gang(run, world=3, entry=_ENTRY).finish()
    recipe = load(run.config).recipe
    model = build_model(recipe.model)
    initialize(model, recipe.model, recipe.train.seed)
    expected = {
        name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }
    for rank in range(3):
        assert json.loads((run.path / f"sums_{rank}.json").read_text()) == expected
