"""The training loop of `fit`: its options, one step at a time, checkpoints and events."""
