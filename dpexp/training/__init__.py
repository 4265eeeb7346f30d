"""The training loop: where clipping, privacy, tasks and models meet.

The heart is `steps`, where every step is made, with `release`, which charges it and adds the noise. `planning` says what a
configuration comes to; `loop` takes the steps of a configured run, with the model of `learner`; `own_loop/` those of a person's
own loop, whose losses are recorded and repeated before they are believed (`watching/`); and `state` keeps what a restart needs.
`optimizers/`, `searches/`, `pate/` and the other files are each what one setting asks for.
"""
