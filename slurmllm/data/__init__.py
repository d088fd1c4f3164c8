"""The data stage: files of many kinds → corpus → packed, exactly resumable token batches.

Reading order: `build` makes a corpus; `sources`, `tokenizer`, `order`, `slots`, `stream` read it
while training, `prefetch` and `worker` in processes of their own; `check` looks at both before a
submit; `builtin` makes a small corpus from Python itself. Nothing here imports torch.
"""
