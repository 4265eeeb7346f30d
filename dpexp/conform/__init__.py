"""The conformance suite: models on which clipping libraries go wrong, and a judge that compares with one example at a time."""
