"""Loss on held-out text, by our own decoder and the sequences of `data.stream`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slurmllm.analysis.evaluate.validation_text import MAX_SEQUENCES
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import DataError
from slurmllm.core.metrics.curves import Ints
from slurmllm.core.metrics.row_reader import perplexity
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import single_sequences
from slurmllm.train.checkpoint.formats.weights import weight_reader
from slurmllm.train.checkpoint.state import read_origin
from slurmllm.train.model import IGNORED
from slurmllm.train.model.decoder import Decoder, build_model
from slurmllm.train.model.init import fill

_TOKENS_PER_BATCH = 2048  # few: their logits alone take 4 bytes times the vocabulary each


class ValidationLoss(NamedTuple):
    """The loss of a model on a text."""

    loss: float  # mean over the target tokens, nats
    error: float | None  # standard error over the batches; None for a single batch
    targets: int  # number of target tokens
    sequences: int

    @property
    def scores(self) -> dict[str, float]:
        """Loss in nats, perplexity, and bits per token."""
        return _by_metric(self.loss, perplexity(self.loss))

    @property
    def errors(self) -> dict[str, float]:
        """Standard errors of the scores, to first order."""
        if self.error is None:
            return {}
        return _by_metric(self.error, self.error * perplexity(self.loss))


def _by_metric(nats: float, of_perplexity: float) -> dict[str, float]:
    return {"loss": nats, "perplexity": of_perplexity, "bits_per_token": nats / math.log(2)}


def held_out_loss(
    directory: Path, spec: StreamSpec, limit: int | None, batch_size: int | None, device: str
) -> ValidationLoss:
    """Return the loss of a checkpoint on a text (`spec`, with a global batch of one sequence).

    By default of MAX_SEQUENCES, in batches of about _TOKENS_PER_BATCH tokens.
    """
    model = load_model(directory, read_origin(directory).model, device)
    rows = single_sequences(spec, limit or MAX_SEQUENCES)
    size = batch_size or max(1, _TOKENS_PER_BATCH // spec.seq_len)
    sums = []  # (sum of losses in nats, target tokens) of each batch
    sequences = 0
    with torch.inference_mode():
        while group := list(itertools.islice(rows, size)):
            labels = _tensor([batch.labels(IGNORED) for batch in group], device)
            places = [
                row_positions for batch in group if (row_positions := batch.positions) is not None
            ]
            positions = _tensor(places, device) if places else None
            mean = model(_tensor([batch.inputs for batch in group], device), labels, positions)
            # The decoder's loss is the mean over all labels, where masked ones count as zero.
            sums.append((float(mean) * labels.numel(), int((labels != IGNORED).sum())))
            sequences += len(group)
    targets = sum(count for _, count in sums)
    if not targets:
        raise DataError("the held-out text has no target token; choose another corpus")
    loss = sum(total for total, _ in sums) / targets
    # Standard error of a ratio of sums, by linearization over the batches.
    spread = sum((total - loss * count) ** 2 for total, count in sums)
    n = len(sums)
    error = math.sqrt(spread * n / (n - 1)) / targets if n > 1 else None
    return ValidationLoss(loss, error, targets, sequences)


def load_model(directory: Path, config: ModelConfig, device: str) -> Decoder:
    """Return a checkpoint's model: in fp32 on a CPU, in bf16 on other devices."""
    # On meta: allocated once, in the final dtype and on the device.
    with torch.device("meta"):
        model = build_model(config)
        if device != "cpu":
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    model.to_empty(device=device)
    fill(model, weight_reader(directory, config))
    return model.eval()


def _tensor(rows: Sequence[Ints], device: str) -> Tensor:
    return torch.from_numpy(np.concatenate(rows)).to(device)
