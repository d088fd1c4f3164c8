"""Recipes and cluster profiles: YAML to frozen models, every fault reported at once.

`recipe.py`, `operation.py` and `cluster.py` hold the models, `rules.py` what must hold between
fields, `yaml_source.py` reads YAML with line numbers, `resolve.py` puts recipe, profile and
overrides together and knows where each value came from.
"""
