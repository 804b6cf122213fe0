"""The evidence step: estimate it, update the prior, keep the best."""
