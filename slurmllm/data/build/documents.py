"""The texts of several files, one after the other, cleaned as a build cleans them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from slurmllm.data.build.cleaning import clean
from slurmllm.data.build.faults import Faults
from slurmllm.data.build.inputs import InputFile
from slurmllm.data.build.options import CleanOptions, ReadOptions
from slurmllm.data.build.readers import DocumentReader


class DocumentStream:
    """The non-empty documents of several files; iterates once.

    Attributes:
        documents: Documents so far.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        options: ReadOptions,
        faults: Faults,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._files = files
        self._options = options
        self._faults = faults
        self._on_progress = on_progress or (lambda _: None)
        self.documents = 0

    def __iter__(self) -> Iterator[str]:
        done_bytes = 0
        for file in self._files:
            reader = DocumentReader(file, self._options, self._faults.add)
            for chunk in reader:
                self._on_progress(done_bytes + reader.position_bytes)
                (texts,) = clean(chunk, CleanOptions()).documents
                self.documents += len(texts)
                yield from texts.to_pylist()
            done_bytes += file.size_bytes
            self._on_progress(done_bytes)
