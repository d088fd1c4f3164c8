"""The data stage: text files → Arrow corpus → packed, exactly resumable token batches.

Reading order: `inputs`, `readers`, `build` make a corpus; `corpus`, `tokenizer`, `order`, `slots`,
`stream` read it while training, `prefetch` and `worker` in processes of their own; `check` looks
at both before a submit; `builtin` makes a small corpus from Python itself. Nothing here imports
torch.
"""
