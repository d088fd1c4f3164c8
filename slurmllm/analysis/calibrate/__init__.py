"""What the nodes at hand can do, measured, as the `hardware` section of a cluster profile."""
