"""All that the guarantee rests on: the plan, its accounting, sampling, noise and the ledger.

Usable alone: nothing here knows of tasks, models, clipping or the configuration. `plan` is what a run will release, with what
that costs by one of the `accountants`; `ledger` is what it has released; `sampling`, `noise` and `sensitivity` make both true
of a step. See ``docs/privacy.md`` for the statement of the guarantee and the derivations."""
