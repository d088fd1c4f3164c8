"""`slurmllm drill`: inject faults into copies of a run and check that they recover exactly.

    plan → reference run → for each kind of fault: start, inject at its step, wait for the end
         → compare with the reference, measure the recovery → table

The run itself is only read. The copies are ordinary runs in the same folder.
"""
