"""The stage behind `slurmllm doctor`: looks at installation and cluster, changes nothing."""
