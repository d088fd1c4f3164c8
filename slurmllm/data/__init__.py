"""The data stage: files of many kinds → corpora → packed, exactly resumable token batches.

Reading order: `build` makes a corpus, `inspecting` says what is in it; `sources` gives documents as
token ids (with `tokenizer` and `chat`); `order`, `split`, `visits`, `blend`, `slots` say which
document comes when and pack them; `spec`, `state`, `batch`, `stream` are what training sees, with
`prefetch` and `worker` in processes of their own; `check` looks at all of it before a submit;
`builtin` makes a small corpus from Python itself. Nothing here imports torch.
"""
