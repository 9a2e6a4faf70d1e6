"""Constants for labels that are not tokens. Standard library only, for data and model code alike."""

IGNORED_LABEL = -100  # not a target: what torch's cross_entropy, and transformers' models, leave out of a loss
LABEL_POSITIONS = "label_positions"  # argument of models that compute logits at labels alone: flat indices of these
