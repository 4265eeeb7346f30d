"""What a trace refuses, in words."""

NOT_PUBLIC = (
    "within engine.public() the model is given values of the private batch, of an earlier one, or rows of the data set: give it "
    "public rows alone there"
)
UNUSED = (
    "nothing of this batch reaches the model or the losses: epsilon is that of examples that engine.batches() has drawn, and not "
    "of rows that the loop takes by itself. Compute losses from the batch that engine.batches() yields. What C++ or torch.jit "
    "makes of it is not seen: call one of torch's own functions on it too"
)
SCALED = (
    "a GradScaler has scaled the losses: every gradient would be clipped as if it were that much longer. Leave it out: bf16 "
    "needs none, and for fp16 PrivacyEngine(..., loss_scale=...) takes a fixed scale, which is taken off before clipping"
)
EARLIER = (
    "{what} on what an earlier batch has left behind (a running mean, a memory bank, a replay buffer): that holds other "
    "examples, without noise; or on rows of the data set that the loop has read beside its batch (negatives, a mean over all). "
    "This voids any guarantee. Leave it out, or make it of public data; what belongs to an example stands in the data set"
)
COUNTED = (
    "{what} on a number that the loop has made of its batch or of the one before (.item(), float(), a mean that the model gives "
    "back or keeps, what ranks add up or gather, a gradient of all losses together), and so on all of its examples, whether a "
    "gradient shows it or not. This voids any guarantee. Leave it out, or use a public one"
)
REPEATED = (
    "the loop takes rows of its batch so that some stand twice (a bootstrap, classes made equally frequent, a row in place "
    "of another): their examples have two losses each, and move the clipped sum by twice the threshold. Leave it out: in a "
    "Poisson sample every example stands once"
)
