"""What a label may be beside an entry of the vocabulary; torch-free."""

# A label that takes no part in the loss, as in torch's cross_entropy.
IGNORED = -100
