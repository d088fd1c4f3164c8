"""The documents of several files, one after the other, and what becomes of those unreadable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmllm.data.build.inputs import InputFile
from slurmllm.data.build.readers import DocumentReader, ReadOptions
from slurmllm.errors import DataError
from slurmllm.progress import OnProgress

_FAULT_EXAMPLES = 20
# Documents between two reports of progress.
_PROGRESS_DOCUMENTS = 256


class Faults:
    """What becomes of input that cannot be read: an error, or a count.

    Attributes:
        count: Documents and files left out so far.
        examples: The first of them: file, place, reason.
    """

    def __init__(self, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.count = 0
        self.examples: list[str] = []

    def add(self, fault: str) -> None:
        """Raise a DataError or count, as told at the start."""
        if not self.skip_bad:
            raise DataError(f"{fault}. Mend the file, or leave such documents out with --skip-bad")
        self.count += 1
        if len(self.examples) < _FAULT_EXAMPLES:
            self.examples.append(fault)


class DocumentStream:
    """The non-empty documents of several files; iterates once.

    Attributes:
        file_index: Which file the last document came from.
        counts: Documents of each file finished so far.
        documents: Documents so far.
        empty: Documents left out so far because they hold white space alone.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        options: ReadOptions,
        faults: Faults,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._files = files
        self._options = options
        self._faults = faults
        self._on_progress = on_progress or (lambda _: None)
        self.file_index = 0
        self.counts: list[int] = []
        self.documents = 0
        self.empty = 0

    def __iter__(self) -> Iterator[str]:
        done_bytes = 0
        for index, file in enumerate(self._files):
            self.file_index = index
            before = self.documents
            with DocumentReader(file, self._options, self._faults.add) as reader:
                for text in reader:
                    if not text or text.isspace():
                        self.empty += 1
                        continue
                    self.documents += 1
                    yield text
                    if self.documents % _PROGRESS_DOCUMENTS == 0:
                        self._on_progress(done_bytes + reader.position_bytes)
            self.counts.append(self.documents - before)
            done_bytes += file.size_bytes
            self._on_progress(done_bytes)
