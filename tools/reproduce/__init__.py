"""The figures of published posts, drawn from small runs of this machine; see docs/reproduce.md."""
