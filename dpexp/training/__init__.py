"""The training loop: where clipping, privacy, tasks and models meet."""
