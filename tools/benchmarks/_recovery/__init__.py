"""A trainer without torch and a loop of sbatch, for tools/benchmarks/recovery.py."""
