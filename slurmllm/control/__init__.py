"""What the workers of an attempt exchange apart from the model's own collectives.

    worker ── Unix socket ── relay in its node's launcher ── TCP ── relays of other nodes, a tree

`plane.ControlPlane` is a worker's end: one connection, whatever the number of workers. A relay
(`relay.Relay`) combines what its node's workers and the nodes below it send, passes one message up,
and hands the result down: a message per worker and per node in each direction, and a wait that
grows with the depth of the tree. Nothing here imports torch.
"""
