"""The texts and tokenizers of the tests of `data`."""

from __future__ import annotations

from data.conftest import corpus, gpt2, texts, tokenizer, wikitext

__all__ = ["corpus", "gpt2", "texts", "tokenizer", "wikitext"]
