"""dpexp: differentially private deep learning, from a command line to a record that can be believed.

The rooms: ``clipping`` (per-example clipped sums for any model), ``privacy`` (all that the guarantee rests on),
``tasks`` and ``models``, ``training`` (where they meet), ``config`` (the only place that knows Hydra).
"""

__version__ = "0.1.0"
