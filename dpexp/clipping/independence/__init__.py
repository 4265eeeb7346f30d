"""The proof that what one example gets out of a model does not depend on the other examples, also where autograd sees nothing.

Weighted losses prove whose gradient is whose (`layouts`). A statistic under ``no_grad``, a quantisation with one scale per
tensor, an expert's capacity or a padding that changes results moves values and no gradient. So the forward is run again with the
same weights on other batches, and what an example gets out of it must stay equal to rounding: with half of the batch gone, with
the other rows replaced, after another batch went before, with more padding. And no buffer may become a function of the batch.
"""

from dpexp.clipping.independence.looks import Independence

__all__ = ["Independence"]
