"""Which module was the first to give an example another thing than before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpexp.clipping.independence.arguments import Inputs
from dpexp.clipping.independence.comparison import outputs
from dpexp.clipping.independence.replay import Replay, again

# of every call of every module, by name and number: what went in, and what came out
Calls = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]


def first_module(replay: Replay, runs: tuple[list[Inputs], list[Inputs]], differs: Any) -> str:
    """Return the name of the first module that got the same and gave another thing; "" where none can be named.

    Args:
        replay: the forward.
        runs: two sequences of batches, of which the last ones are compared.
        differs: tells whether two tensors differ.
    """
    try:
        before, here = (again(_recorded, replay, run) for run in runs)
    except Exception:
        return ""

    def differ(a: list[Tensor], b: list[Tensor]) -> bool:
        return len(a) == len(b) and any(differs(x, y) for x, y in zip(a, b, strict=True))

    for place, (entered, left) in before.items():
        if place in here and differ(left, here[place][1]) and not differ(entered, here[place][0]):
            return place[0]
    return ""


def _recorded(replay: Replay, batches: list[Inputs]) -> Calls:
    """Return the calls for the last of the batches, in the order of their ends."""
    calls: Calls = {}
    entered: list[list[Tensor]] = []
    times: dict[str, int] = {}

    def enter(module: Any, args: tuple, kwargs: dict) -> None:
        entered.append([leaf.clone() for leaf in outputs((args, kwargs)).values()])

    def leave(name: str) -> Any:
        def note(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
            times[name] = times.get(name, -1) + 1
            calls[name, times[name]] = (entered.pop(), [leaf.clone() for leaf in outputs(output).values()])

        return note

    with replay.begun():
        for batch in batches[:-1]:
            replay.run(batch)
        handles = []
        try:
            for name, module in replay.model.named_modules():
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
            replay.run(batches[-1])
        finally:
            for handle in handles:
                handle.remove()
    return calls
