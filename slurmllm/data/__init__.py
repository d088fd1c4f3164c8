"""The data stage: corpora → packed, exactly resumable batches of tokens for training.

Reading order: `sources/` reads documents as token ids (with `tokenizer`); `spec`
describes a stream; `order` decides which document and which corpus comes when; `slots` packs the
documents into sequences; `stream` is what training uses, with `prefetch` to tokenize in separate
processes; `inspection` validates the data before a submit. The corpora are built by
`slurmllm.data.corpus`. Nothing here imports torch.
"""
