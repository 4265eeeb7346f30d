"""The training loop: where clipping, privacy, tasks and models meet.

The heart is `steps`, where every step is made, with `release`, which charges it and adds the noise. `planning` says what a
configuration comes to; `loop` takes the steps of a configured run, `engine` those of a person's own loop, and `state` keeps what
a restart needs. The losses of an own loop are recorded and repeated before they are believed: `watch`, `trace`, `places`,
`redone`, `guards`. Of the other files each is what one setting asks for.
"""
