"""Roles that an operation on followed values may have, as the forward passes that were watched have decided."""

# followed by a digit for every other tensor: 1 for one of the batch, 2 for a constant whose rows look like those of the batch
USE = "use"
# a function of parameters; copies of a value, one for each row of the batch, are a use all the same
DERIVE = "derive"
# a function of parameters, also where its result looks like one row for each example
SHARED = "shared"
# now one, now the other, in places that have the same name
NATIVE = "native"
# left to ordinary autograd
PLAIN = "plain"
# beside them: of what an operation on picked rows gives
PICKED = "picked"
