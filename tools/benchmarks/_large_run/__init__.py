"""A run of thousands of workers and hundreds of attempts, written in the real file formats."""
