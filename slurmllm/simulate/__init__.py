"""A run on many nodes for a month, in seconds: what its failures and its saves will cost.

`simulation.py` lets attempts follow one another in simulated time. What is done after each of them
is not imitated: it is the supervisor's own policy (`supervise.policy`) and the checkpoints' own
interval (`checkpoint.interval`). The outcome is a `History`, accounted for as a real run's is
(`analysis.usage.utilization`).

`failures.py` says what fails and when, `published.py` how often others saw it; `scenario.py` holds
durations, `measured.py` takes them from real runs, `replay.py` holds a simulation against a real
run. No torch.
"""
