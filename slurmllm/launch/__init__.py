"""From a recipe to running workers: submit, supervise, graphs, checks of nodes."""
