"""The archive of compiled graphs: packed by precompile, broadcast to every node's own disk."""
