"""`slurmllm drill`: break copies of a run on purpose and see whether they go on exactly.

    plan → reference run → for each kind: start, wait for the moment, break it, wait for the end
         → compare with the reference, measure the recovery → table

The run itself is only read. The copies are ordinary runs beside it.
"""
