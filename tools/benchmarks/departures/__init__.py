"""Departures of a training whose causes are known, and how well `slurmllm compare` names them."""
