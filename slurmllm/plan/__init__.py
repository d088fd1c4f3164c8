"""Recipe × cluster × node count → mesh degrees and batch arithmetic."""
