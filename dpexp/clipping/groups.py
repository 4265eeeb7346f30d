"""Groups: which parameters share one per-example norm and one threshold (He et al., section 2, group-wise clipping)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from dpexp.errors import UserError, did_you_mean

GroupsSpec = str | Mapping[str, Sequence[str]]


@dataclass
class Group:
    """A set of parameters that is clipped as one vector.

    ``params`` maps the first name of each trainable parameter (as ``named_parameters()`` gives it) to the parameter.
    """

    name: str
    params: dict[str, nn.Parameter] = field(default_factory=dict)

    def __repr__(self) -> str:
        # not the numbers of all weights
        return f"Group({self.name}: {', '.join(self.params)})"

    @property
    def size(self) -> int:
        """Number of coordinates d_k."""
        return sum(p.numel() for p in self.params.values())


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """First name -> parameter, in the order of ``named_parameters()``; a shared parameter appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def build_groups(model: nn.Module, spec: GroupsSpec) -> list[Group]:
    """Partition the trainable parameters of ``model``.

    Args:
        spec: ``"flat"`` (one group), ``"layer"`` (one per module that directly owns a trainable parameter),
            ``"block"`` (one per repeated block, one for what stands before and one for what stands after), or a mapping
            from group name to parameter names that covers every trainable parameter exactly once.

    Raises:
        UserError: nothing is trainable, the spec is unknown, or a mapping misses, repeats or misspells a parameter.
    """
    params = trainable_parameters(model)
    if not params:
        raise UserError("nothing would train: every parameter of the model is frozen (requires_grad=False)")
    if isinstance(spec, Mapping):
        return _from_mapping(model, spec, params)
    if spec == "flat":
        return [Group("flat", params)]
    if spec == "layer":
        return _collect(params, {name: name.rpartition(".")[0] or "(root)" for name in params})
    if spec == "block":
        return _blocks(model, params)
    raise UserError(
        f"groups={spec!r} is not known; choose flat, layer, block or a mapping of names to parameters"
    )


def _collect(params: Mapping[str, nn.Parameter], group_of: Mapping[str, str]) -> list[Group]:
    groups: dict[str, Group] = {}
    for name, param in params.items():
        key = group_of[name]
        groups.setdefault(key, Group(key)).params[name] = param
    return list(groups.values())


def _blocks(model: nn.Module, params: Mapping[str, nn.Parameter]) -> list[Group]:
    stack, count = repeated_blocks(model)
    names = {-1: "before", count: "after"}
    places = block_of(params, stack, count).items()
    return _collect(params, {name: names.get(k, f"{stack}.{k}" if stack else str(k)) for name, k in places})


def repeated_blocks(model: nn.Module) -> tuple[str, int]:
    """Find the longest `ModuleList` or `Sequential` of modules of one class: its name, and how many there are.

    Raises:
        UserError: there is none.
    """
    found, length = None, 1
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module)
            if len(children) > length and len({type(child) for child in children}) == 1:
                found, length = name, len(children)
    if found is None:
        raise UserError(
            "groups by block or by device need a ModuleList or Sequential of at least two modules of one class to cut the model "
            "between; this model has none: use groups='layer' (clip=perlayer), or a mapping"
        )
    return found, length


def block_of(names: Iterable[str], stack: str, count: int) -> dict[str, int]:
    """Parameter -> the number of its block among the ``count`` blocks of ``stack``; -1 before them, ``count`` behind them."""
    start, last = stack + "." if stack else "", -1
    found: dict[str, int] = {}
    for name in names:
        index, _, rest = name[len(start) :].partition(".")
        if name.startswith(start) and index.isdigit() and rest:
            found[name], last = int(index), count
        else:
            found[name] = last
    return found


def _from_mapping(
    model: nn.Module, spec: Mapping[str, Sequence[str]], params: Mapping[str, nn.Parameter]
) -> list[Group]:
    first_name = {id(p): name for name, p in params.items()}
    by_any_name = dict(model.named_parameters(remove_duplicate=False))
    groups: list[Group] = []
    owner: dict[str, str] = {}
    for group_name, names in spec.items():
        group, where = Group(group_name), f"groups[{group_name!r}]"
        if isinstance(names, str):
            raise UserError(f"{where} is a string; give a list of parameter names")
        for name in names:
            if not isinstance(name, str):
                raise UserError(
                    f"{where} holds a {type(name).__name__}: give names, as model.named_parameters() has them"
                )
            if name not in by_any_name:
                hint = did_you_mean(name, list(by_any_name))
                raise UserError(f"{where} names {name!r}, which is no parameter of the model{hint}")
            param = by_any_name[name]
            if id(param) not in first_name:
                raise UserError(f"{where} names {name!r}, which is frozen: leave it out or unfreeze it")
            first = first_name[id(param)]
            if owner.get(first, group_name) != group_name:
                raise UserError(
                    f"parameter {name!r} stands in two groups, {owner[first]!r} and {group_name!r}"
                )
            owner[first] = group_name
            group.params[first] = param
        if not group.params:
            raise UserError(f"{where} is empty")
        groups.append(group)
    if missing := [name for name in params if name not in owner]:
        shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
        many = f"{len(missing)} trainable parameters are in no group"
        raise UserError(f"{many}: {shown}; add them or freeze them")
    return groups
