"""Foreign checkpoints as models of our family: where they lie, what their configs mean, where their weights go."""
