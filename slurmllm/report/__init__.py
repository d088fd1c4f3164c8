"""A report of runs: one page that opens anywhere, and the same as Markdown.

`gather.py` reads what runs are (`facts.py`), `document.py` says it in sections of sentences,
tables and plots, `html.py` and `markdown.py` write these down.
"""
