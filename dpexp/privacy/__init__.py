"""All that the guarantee rests on: the plan, its accounting, sampling, noise and the ledger.

Usable alone: nothing here knows of tasks, models, clipping or the configuration. Only `noise`, `sensitivity` and
`fingerprint` import torch. See ``docs/privacy.md`` for the statement of the guarantee and the derivations."""
