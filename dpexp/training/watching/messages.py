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
