"""`slurmllm drill`: inject faults into copies of a run and check that they recover exactly.

The run itself is only read. The copies are ordinary runs in the same folder.
"""
