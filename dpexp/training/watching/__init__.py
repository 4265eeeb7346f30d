"""What is proven of the losses of a loop of one's own: no example's loss may depend on the others of its batch, which no
gradient shows.

Read `watch` (when it is looked) → `trace` (what the loop does with a batch, written down) → `redone` (done again with other
examples in it: what must not change) → `others` (who stands in whose place). `collating` calls the collate function for other
batches of the same rows, `functions` asks a function that computes losses, `misfits` are refused before a run, and `guards`
notice what a loop does beside the engine.
"""
