"""From what a run or another framework wrote to curves."""
