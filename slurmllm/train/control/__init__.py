"""What the workers of an attempt exchange apart from the model's own collectives.

    worker ── Unix socket ── relay in its node's launcher ── TCP ── the first node's relay

`plane.ControlPlane` is a worker's end: one connection, whatever the number of workers. A relay
(`relay.Relay`) combines what its node's workers send, passes one message on to the first node's
relay and hands the result down. Nothing here imports torch.
"""
