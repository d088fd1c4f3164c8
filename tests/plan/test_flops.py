"""Work and traffic in numbers, against what others count."""

from __future__ import annotations

import csv

import pytest
from published_rows import FOLDER, configuration

from slurmllm.config.resolve import resolve
from slurmllm.plan.parameters import (
    attention_flops,
    block_elements,
    block_parameters,
    block_products,
    head_product,
    model_flops,
    parameters,
    rest_parameters,
)

PEAK = {"A100-40GB": 312e12, "A100-80GB": 312e12, "H100-80GB": 989.5e12}


def test_model_flops_are_those_of_llm_foundry() -> None:
    """Its tables give MFU beside tokens a second: 128 runs of six models, lengths 512 to 65536."""
    with (FOLDER / "published_gpu.csv").open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["mfu"]]
    assert len(rows) == 128
    for row in rows:
        length = int(row["seq_len"])
        model = configuration(row["model"], length, "p4d", []).recipe.model
        per_s = float(row["throughput_value"]) / length
        devices = int(row["dp"])
        mfu = 100 * model_flops(model, 1) * per_s / (devices * PEAK[row["hardware"]])
        # They count the learned positions (up to 7 % of the 125M model at 65536) as weights of a
        # matrix, and round.
        assert mfu == pytest.approx(float(row["mfu"]), rel=0.03 if length <= 8192 else 0.09)


@pytest.mark.parametrize("recipe", ["llama2_70b", "neox_20b", "gpt3_1.3b"])
def test_products_are_the_matrices(recipe: str) -> None:
    model = resolve(recipe).recipe.model
    products = block_products(model, 10, 1)
    matrices = sum(product.n * product.k for product in products)
    assert matrices == pytest.approx(block_parameters(model), rel=0.002)  # but norms and biases
    whole = model.num_layers * block_parameters(model) + rest_parameters(model, 1)
    assert whole == parameters(model)
    head = head_product(model, 10, 1)
    assert (head.m, head.n, head.k) == (10, model.padded_vocab_size, model.hidden_size)


def test_tensor_parallel_workers_share_the_work() -> None:
    model = resolve("llama2_70b").recipe.model
    tokens = model.seq_len

    def work(tensor: int) -> int:
        return sum(product.flops for product in block_products(model, tokens, tensor))

    assert 8 * work(8) == work(1)
    # 8 key and value heads for 32 workers: each lies on four of them.
    assert 32 * work(32) > work(1)
    copied = 2 * 3 * model.kv_heads * model.head_width  # keys and values, three more of each
    assert 32 * work(32) - work(1) == 2 * tokens * copied * model.hidden_size
    assert 32 * attention_flops(model, tokens, 32) == attention_flops(model, tokens, 1)
    shared = block_elements(model, tokens, 8, True)
    alone = block_elements(model, tokens, 8, False)
    assert alone - shared == 10 * tokens * model.hidden_size * 7 // 8
