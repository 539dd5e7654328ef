"""The loop and what it needs: device, optimizers, evaluation, checkpoints, processes."""
