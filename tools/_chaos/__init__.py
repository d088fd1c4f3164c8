"""The parts of `tools/chaos`: plans, failures, one run, what is checked, the table at the end."""
