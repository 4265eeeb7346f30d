"""Parameters that the losses reach and that do not belong to the attached model: they would train on nothing, without a word."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from dpexp.clipping.tapping.roots import Roots
from dpexp.clipping.tapping.taps import BY_TAP
from dpexp.errors import UserError


def refuse_foreign(roots: Roots, attached: Iterable[Tensor]) -> None:
    """Refuse losses behind which a trainable parameter of another module stands, like a head beside the attached model.

    Args:
        roots: the losses with their graph, which is walked.
        attached: the parameters that are clipped.

    Raises:
        UserError: names the first such parameter by its shape; its module is not known here.
    """
    own = {id(p) for p in attached}
    for node in roots.graph():
        if isinstance(node, BY_TAP) and own.isdisjoint(map(id, node.recorder.params.values())):
            raise UserError(
                "behind the losses stand two models with a clipper each, and each would clip a part of an example's gradient: "
                "put both into one nn.Module and attach to that"
            )
        # a leaf's node knows its tensor
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            raise UserError(
                f"the losses also depend on a trainable parameter of shape {list(leaf.shape)} that is not in the attached model "
                "(a head beside it?): it would get no gradient. Put both into one nn.Module and attach to that, or freeze it "
                "with requires_grad_(False)"
            )
