"""Two or more curves held against each other."""
