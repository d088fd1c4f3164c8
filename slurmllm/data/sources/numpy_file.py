"""NumPy files of token ids (`.npy`), as many data preparations write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slurmllm.data.sources.fingerprint import fingerprint
from slurmllm.data.sources.tokenized import Ids, TokenizedSource
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

MAGIC = b"\x93NUMPY"
# Shuffled as one: much longer than what attention gains from its neighbours, short enough that
# the order mixes a corpus well.
BLOCK_TOKENS = 4096


class NumpySource(TokenizedSource):
    """Token ids of a `.npy` file, taken as they are: nothing is added.

    One axis: no index says where documents begin, so what is shuffled is blocks of BLOCK_TOKENS
    (the last may be shorter); a mask still sees real documents, by the end-of-document tokens in
    them and by the blocks' edges. Two axes: each row is a document.

    Args:
        path: The file.
        encoder: Says which token ends a document. None: only blocks and rows begin documents.
        vocab_size: The model's.

    Raises:
        DataError: missing, cut, or not of integers in one or two axes.
    """

    def __init__(self, path: Path, encoder: TokenEncoder | None, vocab_size: int | None) -> None:
        super().__init__(None if encoder is None else encoder.end_of_document, vocab_size)
        self.path = path
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise DataError(f"no corpus {path}; name a .npy file of token ids") from error
        except (OSError, ValueError, EOFError) as error:
            if "Object arrays" in str(error):
                raise DataError(
                    f"{path} holds Python objects; token ids must be integers: save them so with "
                    "numpy.save"
                ) from error
            raise DataError(
                f"{path} is not a whole .npy file: {error}; was it cut while it was copied? Copy "
                "or save it again"
            ) from error
        if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu" or tokens.size == 0:
            raise DataError(
                f"{path} holds {tokens.dtype} of shape {list(tokens.shape)}; token ids must be "
                "integers in one axis, or in two with a document a row: save it so with numpy.save"
            )
        self._tokens: Ids = tokens
        self.in_blocks = tokens.ndim == 1
        self.knows_documents = tokens.ndim == 2 or encoder is not None
        self.fingerprint = fingerprint([path], "numpy")

    def __len__(self) -> int:
        rows = len(self._tokens)
        return rows if self._tokens.ndim == 2 else -(-rows // BLOCK_TOKENS)

    @property
    def total_size(self) -> int:
        """Token ids of the file."""
        return int(self._tokens.size)

    def document(self, document: int) -> Ids:
        """The token ids of a row or block."""
        begin = document * BLOCK_TOKENS
        end = begin + BLOCK_TOKENS
        ids: Ids = self._tokens[document] if self._tokens.ndim == 2 else self._tokens[begin:end]
        return ids
