"""The command line: one file per verb.

A file imports only click at its top, and its stage inside the verb, so that `slurmllm --help`
is immediate and the login node never loads torch.
"""
