"""Names of the statistics of targets that the model's head finds on the way to their log-probabilities."""

ENTROPY, MEAN_LOGIT = "entropy", "mean_logit"
"""Of the tokens that may be there the entropy, nats; and the mean of their logits. Both of logits / temperature."""
