"""From input files of many kinds to one corpus (`slurmllm data build`).

1. `inputs.py` finds the files and fixes their order.
2. `shard.py` groups them into shards and reads each with `readers/` and `decompress.py` into an
   Arrow stream; `build.py` does so in this process, in worker processes or in Slurm jobs.
3. `join.py` marks duplicates and streams the shards into one Arrow record batch or into Megatron's
   `.bin` and `.idx`, a few megabytes at a time.

`build.py` runs these steps and writes the manifest. Finished shards stay in the work folder
(`work_folder.py`) until the corpus is complete, so that an interrupted build continues.
`builtin.py` makes the `stdlib` corpus. Nothing imports torch.
"""
