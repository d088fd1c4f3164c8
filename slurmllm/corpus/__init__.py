"""From files of many kinds to one corpus file (`slurmllm data build`).

1. `inputs.py` finds the files and fixes their order; `shards.py` cuts them into runs of files.
2. `shard.py` reads one run with `readers/`, cleans it (`cleaning.py`) and writes its columns, in
   a process of this machine (`local_workers.py`) or in a Slurm job (`slurm_workers.py`).
3. `duplicates.py` finds the documents that came before.
4. `join.py` streams the columns of all runs into one Arrow record batch, or `megatron.py` into
   one `.bin` and `.idx`; neither holds more than a few megabytes.

`corpus.py` runs the steps; what is finished stays in the work folder (`work.py`) until the corpus
is there.
"""
