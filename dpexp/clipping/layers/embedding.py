"""``nn.Embedding``."""

from __future__ import annotations

from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Lookup
from dpexp.clipping.contributions.numerics import by_example


class Embedding:
    """Rows of a table, by index, with repeats and ``padding_idx``."""

    name = "embedding"
    parameters = frozenset({"weight"})

    def refusal(self, module: nn.Module) -> str | None:
        assert isinstance(module, nn.Embedding)
        if module.scale_grad_by_freq:
            return (
                "scale_grad_by_freq divides by how often an index occurs in the whole batch, so one example's "
                "gradient depends on the others: set it to False"
            )
        if module.max_norm is not None:
            return (
                "max_norm rewrites the rows that a batch looks up, which releases without noise which rows these "
                "were: set it to None"
            )
        if module.sparse:
            return "sparse=True gives sparse gradients, but noise makes every row's gradient dense: set it to False"
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, nn.Embedding)
        if "weight" not in names:
            return {}
        ids, g = by_example(x[0], num_examples, 0), by_example(gy, num_examples, 1)
        return {"weight": Lookup(ids, g, module.num_embeddings, module.padding_idx)}
