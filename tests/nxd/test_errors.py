"""Each error of NxD that is worked around, and that it is there: without the work-around it shows.

docs/nxd.md lists them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mesh_pool import Case, MeshPool, deviation, small_run

from nxd.conftest import Reference
from nxd.test_meshes import KV1, TOLERANCE, _first

pytestmark = pytest.mark.nxd


def reduce_in_fp32() -> None:
    """NxD's default `reduce_dtype`."""
    import torch

    from slurmllm.train.backends.nxd.model import Layers

    made = Layers.__init__

    def changed(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self._options["reduce_dtype"] = torch.float32

    Layers.__init__ = changed  # type: ignore[method-assign]


def test_bf16_layers_reduce_in_bf16(pool: MeshPool, native: Reference) -> None:
    config = small_run("neox", 2, 1, 1, "backend=nxd", "train.precision=bf16_mixed")
    expected = _first(native("neox"), 2)
    right = deviation(pool.run(Case(config, last=2)), expected)[1]
    wrong = deviation(pool.run(Case(config, last=2, prepare=reduce_in_fp32)), expected)[1]
    assert right < 1e-2 < wrong


def load_in_one_call() -> None:
    """the optimizer is loaded before the weights that ZeRO-1 takes its shards from."""
    import neuronx_distributed as nxd

    from slurmllm.train.backends.nxd import saving

    def load(directory: Path, model: Any, optimizer: Any) -> None:
        nxd.load_checkpoint(str(directory), tag=saving.TAG, model=model, optimizer=optimizer)

    saving.load = load


def test_weights_are_loaded_before_the_optimizer(pool: MeshPool, tmp_path: Path) -> None:
    config = small_run("neox", 2, 1, 2, "backend=nxd")
    unbroken = pool.run(Case(config, last=6))
    pool.run(Case(config, last=3, save=tmp_path / "c"))
    resumed = Case(config, first=3, last=6, load=tmp_path / "c")
    assert pool.run(resumed)[0].rows == unbroken[0].rows[3:]
    broken = Case(config, first=3, last=6, load=tmp_path / "c", prepare=load_in_one_call)
    assert pool.run(broken)[0].rows != unbroken[0].rows[3:]


def count_every_copy() -> None:
    """repeated keys and values counted once for each worker that holds them."""
    from slurmllm.train.backends.nxd.shards import CopyCounts, ParameterShards

    ParameterShards.copy_counts = lambda self, name, stages: CopyCounts(  # type: ignore[method-assign]
        self.tensor if self.share(name).dim is None else 1
    )


def keep_own_gradients() -> None:
    """copies of a key and value, and norms of queries, trained by the worker's own heads alone."""
    from slurmllm.train.backends.nxd import runtime

    runtime.sum_ = lambda parts, group: None


@pytest.mark.parametrize("without", [count_every_copy, keep_own_gradients])
def test_repeated_keys_and_values(pool: MeshPool, native: Reference, without: Any) -> None:
    config = small_run("llama", 4, 1, 1, "backend=nxd", KV1)
    expected = _first(native("llama", KV1), 5)
    assert max(deviation(pool.run(Case(config, last=5)), expected)) < TOLERANCE
    wrong = pool.run(Case(config, last=5, prepare=without))
    assert deviation(wrong, expected)[1] > 1e-3


def test_norms_of_queries_and_keys(pool: MeshPool, native: Reference) -> None:
    config = small_run("qwen3", 2, 1, 1, "backend=nxd")
    expected = _first(native("qwen3"), 5)
    assert max(deviation(pool.run(Case(config, last=5)), expected)) < TOLERANCE
    wrong = pool.run(Case(config, last=5, prepare=keep_own_gradients))
    assert deviation(wrong, expected)[1] > 1e-4


def clip_as_zero1_does() -> None:
    """ZeRO-1's own clipping, at a norm of 1 whatever NxD's configuration asks for."""
    from slurmllm.train.backends.nxd import runtime

    clip = runtime.clip_
    runtime.clip_ = lambda gradients, norm, limit: clip(gradients, norm, 1.0)


def test_zero1_clips_where_asked(pool: MeshPool, native: Reference) -> None:
    limit = "optim.grad_clip=0.05"
    config = small_run("neox", 1, 1, 2, "backend=nxd", limit, "optim.eps=0.01")
    expected = _first(native("neox", limit, "optim.eps=0.01"), 5)
    assert max(deviation(pool.run(Case(config, last=5)), expected)) < TOLERANCE
    wrong = pool.run(Case(config, last=5, prepare=clip_as_zero1_does))
    assert max(deviation(wrong, expected)) > TOLERANCE


def leave_untied() -> None:
    """ties that NxD loses when it leaves the meta device."""
    from slurmllm.train.backends.nxd.model import ParallelDecoder

    tie = ParallelDecoder.tie

    def once(self: Any) -> None:
        if self.embed.weight.is_meta:
            tie(self)

    ParallelDecoder.tie = once  # type: ignore[method-assign]


def test_tied_embeddings_stay_tied(pool: MeshPool, native: Reference) -> None:
    config = small_run("gpt3", 2, 1, 1, "backend=nxd")
    expected = _first(native("gpt3"), 3)
    assert max(deviation(pool.run(Case(config, last=3)), expected)) < TOLERANCE
    wrong = pool.run(Case(config, last=3, prepare=leave_untied))
    assert deviation(wrong, expected)[1] > 1e-2


def hand_over_the_logits() -> None:
    """NxD's cross entropy overwrites its input."""
    import torch

    to = torch.Tensor.to

    def without_copy(self: Any, *args: Any, **more: Any) -> Any:
        more.pop("copy", None)
        return to(self, *args, **more)

    torch.Tensor.to = without_copy  # type: ignore[method-assign, assignment]


def loss_of_marked_labels(backend: Any) -> tuple[float, float, float]:
    """Loss and largest gradient of logits of which some labels take no part, and torch's loss."""
    import torch
    from torch.nn import functional as F

    from slurmllm.train.backends.nxd.model import IGNORED, ParallelLoss

    torch.manual_seed(0)
    vocabulary, share = 512, 512 // backend.mesh.tensor
    whole = torch.randn(2, 8, 512)
    labels = torch.randint(0, vocabulary, (2, 8))
    labels[:, :3] = IGNORED
    expected = F.cross_entropy(whole[..., :vocabulary].flatten(0, 1), labels.flatten())
    rank = backend.worker.rank % backend.mesh.tensor
    mine = whole[..., rank * share : (rank + 1) * share].clone().requires_grad_()
    before = mine.detach().clone()
    loss_function = ParallelLoss(vocabulary, 512)
    loss_function.weight = torch.tensor([8 / 5])  # all labels over those that count
    loss = loss_function(mine, labels)
    loss.backward()
    assert mine.grad is not None
    return (
        loss.item() - expected.item(),
        float((mine - before).abs().max()),
        float(mine.grad[:, :3].abs().max()),
    )


def test_ignored_labels_and_the_logits_stay(pool: MeshPool) -> None:
    config = small_run("neox", 2, 1, 1, "backend=nxd")
    for outcome in pool.run(Case(config, last=0, before=loss_of_marked_labels)):
        off, changed, leaked = outcome.before
        assert abs(off) < 1e-5
        assert changed == 0
        assert leaked == 0
    wrong = Case(config, last=0, before=loss_of_marked_labels, prepare=hand_over_the_logits)
    assert any(outcome.before[1] > 0 for outcome in pool.run(wrong))
