"""Loss on text that training never saw, by our own decoder and data stream.

The sequences are those that training would have packed of the held-out documents, in the order of
the seed: the first of them, once through the documents at most. All checkpoints of a run meet the
same ones. What does not fill a last sequence is left out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slurmllm.checkpoint.formats.weights import weight_reader
from slurmllm.checkpoint.origin import read_origin
from slurmllm.config.recipe import ModelConfig
from slurmllm.data.slots import POSITION
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import Batch, PackedStream
from slurmllm.errors import DataError
from slurmllm.evaluate.validation_text import MOST_SEQUENCES
from slurmllm.model import IGNORED
from slurmllm.model.decoder import Decoder, build_model
from slurmllm.model.init import fill

_TOKENS_AT_A_TIME = 2048


class Loss(NamedTuple):
    """What a model loses on a text.

    Attributes:
        loss: Mean over the labels that count, nats.
        error: Standard error of it, over the groups of sequences; None of a single one.
        labels: That count.
        sequences: Read.
        seconds: That it took.
    """

    loss: float
    error: float | None
    labels: int
    sequences: int
    seconds: float

    @property
    def scores(self) -> dict[str, float]:
        """Loss in nats, perplexity, and bits a token."""
        perplexity = math.exp(min(self.loss, 700.0))
        return {
            "loss": self.loss,
            "perplexity": perplexity,
            "bits_per_token": self.loss / math.log(2),
        }

    @property
    def errors(self) -> dict[str, float]:
        """Standard errors of these, to first order."""
        if self.error is None:
            return {}
        return {
            "loss": self.error,
            "perplexity": self.error * self.scores["perplexity"],
            "bits_per_token": self.error / math.log(2),
        }


def held_out_loss(
    directory: Path, spec: StreamSpec, limit: int | None, batch_size: int | None, device: str
) -> Loss:
    """The loss of a checkpoint.

    Args:
        directory: The checkpoint folder.
        spec: What to read; its global batch is one sequence.
        limit: Sequences at most; None: MOST_SEQUENCES.
        batch_size: Sequences at a time; None: as many as make some thousand tokens.
        device: Of torch.

    Raises:
        DataError: the corpus or the tokenizer cannot serve.
        StorageError: the checkpoint is damaged.
    """
    begun = time.monotonic()
    model = load_model(directory, read_origin(directory).model, device)
    rows = batches(spec, limit or MOST_SEQUENCES)
    size = batch_size or max(1, _TOKENS_AT_A_TIME // spec.seq_len)
    sums: list[tuple[float, int]] = []
    sequences = 0
    with torch.inference_mode():
        while group := list(itertools.islice(rows, size)):
            sums.append(_loss(model, group, device))
            sequences += len(group)
    labels = sum(count for _, count in sums)
    if not labels:
        raise DataError("the held-out text has no token to predict; name another corpus")
    loss = sum(total for total, _ in sums) / labels
    # Of a ratio of sums: the spread of what each group of sequences adds to it.
    spread = sum((total - loss * count) ** 2 for total, count in sums)
    n = len(sums)
    error = math.sqrt(spread * n / (n - 1)) / labels if n > 1 else None
    return Loss(loss, error, labels, sequences, time.monotonic() - begun)


def load_model(directory: Path, config: ModelConfig, device: str) -> Decoder:
    """A checkpoint's model: in fp32 on a CPU, in bf16 elsewhere."""
    with torch.device("meta"):
        model = build_model(config)
        if device != "cpu":
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    model.to_empty(device=device)
    fill(model, weight_reader(directory, config))
    return model.eval()


def batches(spec: StreamSpec, most: int) -> Iterator[Batch]:
    """Single sequences, once through the documents, `most` at most; one at least."""
    assert spec.global_batch == 1
    with closing(PackedStream(spec, 0, 1)) as stream:
        documents = [corpus["documents"] for corpus in stream.identity["corpora"]]
        for number in range(most):
            batch = stream.next_batch()
            (slot,) = stream.state()["slots"]
            # Visits begin anew at the number of documents: a sequence that reaches there has been
            # filled up with documents read before.
            if number and any(
                slot[place * POSITION] >= count for place, count in enumerate(documents)
            ):
                return
            yield batch


def _loss(model: Decoder, group: Sequence[Batch], device: str) -> tuple[float, int]:
    """Sum of the losses of some sequences, nats, and the number of their labels that count."""
    labels = _tensor([batch.labels(IGNORED) for batch in group], device)
    places = [place for batch in group if (place := batch.positions) is not None]
    positions = _tensor(places, device) if places else None
    mean = model(_tensor([batch.inputs for batch in group], device), labels, positions)
    return float(mean) * labels.numel(), int((labels != IGNORED).sum())


def _tensor(rows: Sequence[npt.NDArray[np.int64]], device: str) -> Tensor:
    return torch.from_numpy(np.concatenate(rows)).to(device)
