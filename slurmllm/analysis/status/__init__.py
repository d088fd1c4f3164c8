"""The status of runs: state, logs, node hours, recoveries; `report` and `drill` use them too."""
