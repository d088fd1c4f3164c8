"""Corpora as training reads them: one file per kind of corpus."""
