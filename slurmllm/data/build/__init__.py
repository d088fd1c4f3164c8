"""From files of many kinds to one corpus file (`slurmllm data build`)."""
