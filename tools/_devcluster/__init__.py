"""The parts of `tools/devcluster`: configuration, processes, cluster."""
