"""Optimisers and filters of gradients that know of the noise; `choice` builds what a configuration names."""
