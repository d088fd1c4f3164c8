"""Where training reads its documents: one file a kind of corpus."""
