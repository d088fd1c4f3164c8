"""What runs on the allocation: from the batch script's process to the workers, and back.

1. `supervisor.py` is the batch script's own process: it opens an attempt, puts the graph cache
   onto the nodes, starts a launcher on each of them, waits, classifies the ending and acts.
2. `launcher.py` runs on every node: it starts the node's workers and records how they ended.
3. `cache.py` packs and unpacks compiled graphs; `allocation.py` is the set of nodes, Slurm's or
   this machine's; `attempts.py` keeps the records; `classify.py` is the table of endings.
4. `local.py` plays Slurm for `submit --local`: it runs the same scripts, restarts included.

Nothing here imports torch.
"""
