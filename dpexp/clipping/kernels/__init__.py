"""Kernels for GPUs, each with a plain torch twin in `dpexp.clipping.gradients`."""
