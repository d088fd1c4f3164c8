"""The archive of compiled graphs: packed once by precompile, copied to every node's own disk."""
