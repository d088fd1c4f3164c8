"""The month simulator: a run on many nodes for a month, simulated in seconds.

`simulation.py` plays attempts one after another in simulated time. What follows each of them is
not imitated: it is the supervisor's own policy (`supervise.policy`) and the checkpoints' own
interval (`plan.lost_time`). The result is a `RunHistory`, accounted for as a real run's is.

`scenario.py` describes a run to simulate, and draws what fails and when.
"""
