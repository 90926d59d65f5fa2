"""Training: validated recipes, a loop that resumes to the bit, checkpoints that survive a kill, results on disk."""
