"""The Python environment and small input files on the nodes' own disks, from where workers run."""
