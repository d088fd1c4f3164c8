"""The texts and tokenizers of the tests of `data`."""

from data.conftest import corpus, gpt2, texts, tokenizer, wikitext

__all__ = ["corpus", "gpt2", "texts", "tokenizer", "wikitext"]
