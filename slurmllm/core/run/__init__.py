"""The run directory: the names of its files, their records, and safe reading and writing."""
