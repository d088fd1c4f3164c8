"""A report of runs: one HTML page that opens without a network, and JSON.

`sources.py` reads runs into `facts.py`; `document.py` arranges them in sections of sentences,
tables and plots; `write.py` writes these as HTML and JSON.
"""
