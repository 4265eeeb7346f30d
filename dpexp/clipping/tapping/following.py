"""Following a parameter to the operation where it meets the batch.

Inside of a forward, reading ``module.weight`` gives a `Followed` value: the parameter with its ordinary autograd history. A
function of followed values and constants alone is followed again, and keeps its own autograd graph. Where a followed value and
the batch meet in one torch function, this *use* gets a tap (`meeting`), and the operation runs with the value detached. Anything
else is left to ordinary autograd: the gradient then reaches the parameter itself, the survey sees that, and the parameter is
handed to the loop over examples. So what is missing here costs time, never correctness.

Which tensors come from the batch is watched in the first forward passes only (`dataflow`); what was decided there of each
operation, its *role*, holds from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from dpexp.clipping.compiling import uncompiled
from dpexp.clipping.refusals import STRIDED
from dpexp.clipping.tapping import copies, meeting
from dpexp.clipping.tapping.dataflow import KINDS, in_place
from dpexp.clipping.tapping.forwards import DERIVE, NATIVE, PLAIN, SHARED, USE
from dpexp.clipping.tapping.rewritten import REWRITTEN_FUNCTIONS
from dpexp.clipping.tapping.taps import Recorder
from dpexp.clipping.tapping.values import Call, operation_key
from dpexp.errors import UserError

TRANSPOSES = (torch.Tensor.T.__get__, torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
# what is done to the parameter itself: a hook is put where the clipper looks for it, and refuses it; a copy is a leaf
TO_THE_PARAMETER = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.__deepcopy__)
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# attributes that the followed value, which autograd knows as a view of the parameter, does not have itself
OF_THE_PARAMETER = frozenset({"is_leaf", "grad", "grad_fn"})


class Followed(torch.Tensor):
    """A value computed from parameters and constants alone.

    Attributes:
        key: the parameter's name, or the operations that made the value; None once the batch was written into it.
        recorder: of the clipper.
        param: the parameter that it is, unchanged; None for a function of parameters.
        seen: of a function of parameters, the version of its memory that is known to hold nothing of the batch.
    """

    key: str | None
    recorder: Recorder
    param: nn.Parameter | None
    seen: int
    _is_param: bool

    @staticmethod
    def of(param: nn.Parameter, name: str, recorder: Recorder) -> Followed:
        """Follow a parameter."""
        result = param.as_subclass(Followed)
        if param.__dict__:
            # what people hang on a parameter
            result.__dict__.update(param.__dict__)
        result.key, result.recorder, result.param = name, recorder, param
        # what isinstance(…, nn.Parameter) asks
        result._is_param = True
        return result

    @staticmethod
    def made(value: Tensor, key: str, recorder: Recorder) -> Followed:
        """Follow a function of parameters."""
        result = value.as_subclass(Followed)
        result.key, result.recorder, result.param, result.seen = key, recorder, None, value._version
        return result

    @property
    def changed(self) -> bool:
        """Whether something was written into it that following has not seen."""
        return self.param is None and self._version != self.seen

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _written_out(func, args, kwargs) if func in REWRITTEN_FUNCTIONS else NotImplemented
        return _dispatch(func, args, kwargs) if result is NotImplemented else result


# a compiler must not look inside, as below
@uncompiled
def _written_out(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a function as the operations that it consists of; NotImplemented where it has to run as it is."""
    recorder = next(item.recorder for item in (*args, *kwargs.values()) if type(item) is Followed)
    if not (torch.is_grad_enabled() and recorder.following):
        return NotImplemented
    # who watches the forward has seen one function, and sees what it consists of
    with recorder.flow or nullcontext():
        return REWRITTEN_FUNCTIONS[func](*args, **kwargs)


@uncompiled
def _dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if func.__name__ == "__set__":
            return _set(func, *args)
        if func.__name__ == "__get__" and func.__self__.__name__ in OF_THE_PARAMETER:
            return func(args[0] if args[0].param is None else args[0].param)
        if func in TO_THE_PARAMETER and args[0].param is not None:
            return getattr(args[0].param, func.__name__)(*args[1:], **kwargs)
        # no tap goes into torch.func's transforms, nor where tangents are computed beside the values
        transformed = peek_interpreter_stack() is not None or forward_ad._current_level >= 0
        plainly = torch.is_grad_enabled() and not transformed
        if plainly and func is torch.Tensor.__getitem__ and _is_number(args[1]):
            # which of the matrices that a parameter stacks: it decides no more than a number of Python's does
            args = (args[0], int(args[1]))
        if plainly and (func.__name__ != "__get__" or func in TRANSPOSES):
            plain = [*args, *kwargs.values()] if kwargs else args
            values = [item for item in plain if type(item) is Followed]
            if values:
                key = operation_key(func, values)
                result = meeting.again(Call(values[0].recorder, func, args, kwargs, values, key))
                if result is not NotImplemented:
                    return result
            groups = (
                item if isinstance(item, list | tuple) else (item,) for item in (*args, *kwargs.values())
            )
            tensors = [item for group in groups for item in group if isinstance(item, Tensor)]
            values = [t for t in tensors if type(t) is Followed and t.key is not None]
            if values and values[0].recorder.following:
                key = operation_key(func, values)
                result = _meet(Call(values[0].recorder, func, args, kwargs, values, key), tensors)
                if result is not NotImplemented:
                    return result
        return func(*args, **kwargs)


def _is_number(index: Any) -> bool:
    return (
        isinstance(index, Tensor)
        and index.dim() == 0
        and not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
    )


def _set(func: Any, value: Any, *given: Any) -> None:
    """Set an attribute where it belongs: on the parameter, like the data of a weight that is held to a norm in the forward."""
    param = getattr(value, "param", None)
    if param is not None:
        func(param, *given)
    if param is None or func == SET_DATA:
        func(value, *given)


def _meet(call: Call, tensors: list[Tensor]) -> Any:
    """Compute an operation on followed values; NotImplemented where it is left to ordinary autograd."""
    recorder, func, values = call.recorder, call.func, call.values
    if func in KINDS and call.first is not values[0]:
        # numbers of the batch, of the weight's kind or shape
        return NotImplemented
    call.others = [t for t in tensors if func not in KINDS and not any(t is value for value in values)]
    role = recorder.known_role(call.key)
    if role == NATIVE:
        # a layer that is given an identity matrix beside the batch (DoRA): the number of dimensions may tell which is which
        call.key += f"~{','.join(str(t.dim()) for t in call.others)}"
        role = recorder.known_role(call.key)
    if role is None or (recorder.flow is not None and role not in (NATIVE, PLAIN)):
        found = _role(recorder, call.others)
        # what turned out to be a function of parameters still is, whatever its constants look like
        if role != SHARED or "1" in found or func.__name__ in copies.EXPANSIONS:
            role = found
        _remember(recorder, call.key, role)
    if role in (DERIVE, SHARED):
        if role == DERIVE and func.__name__ in copies.EXPANSIONS:
            result = copies.expansion(call)
            if result is not None:
                return result
        return _derive(call)
    planned = role.startswith(USE) and len(role) == len(USE) + len(call.others)
    if not planned or any(value.changed for value in values):
        return NotImplemented
    if in_place(func) and any(call.first is value for value in values):
        # the batch goes into it: no value of parameters alone any more
        call.first.key = None
        return NotImplemented
    call.batched = [t for t, digit in zip(call.others, role[len(USE) :], strict=True) if digit != "0"]
    result = meeting.use(call)
    if result is NotImplemented and "1" not in role:
        # nothing of the batch is in it
        _remember(recorder, call.key, DERIVE)
        result = _derive(call)
    return result


def _remember(recorder: Recorder, key: str, role: str) -> None:
    """Note the role of an operation in a forward pass that is watched, where it may have had another one before."""
    if recorder.current is None or recorder.flow is None:
        return
    before = recorder.current.roles.setdefault(key, role)
    if before == role:
        return
    if "1" not in before + role and before != NATIVE:
        # constants alone: those of the batch's size (coordinates of as many positions) only look like it
        role = DERIVE
    else:
        before, role = before.replace("2", "1"), role.replace("2", "1")
        role = role if before == role else NATIVE
    recorder.current.roles[key] = role


def _role(recorder: Recorder, others: Sequence[Tensor]) -> str:
    flow, rows = recorder.flow, recorder.rows

    def digit(t: Tensor) -> str:
        # what a gradient goes to although it is not followed depends on the batch, or on a tap
        if t.requires_grad:
            return "1"
        if flow is None:
            return "1" if t.dim() > 0 and (rows is None or rows in t.shape[:2]) else "0"
        return "1" if t in flow else "2" if _has_row_for_each(t, rows) else "0"

    if any(t.is_nested and t.layout == torch.strided for t in others):
        raise UserError(STRIDED)
    digits = "".join(map(digit, others))
    return USE + digits if digits.strip("0") else DERIVE


def _has_row_for_each(constant: Tensor, rows: int | None) -> bool:
    """Tell whether a constant has a row for each example (a first state, an index), or several, the same ones for all, as token
    types that nobody gave have, and masks of windows: it is best treated like a tensor of the batch."""
    if constant.dim() < 2 or not rows or isinstance(constant, nn.Parameter):
        return False
    count = constant.shape[0]
    if count <= rows or count % rows or constant.is_nested or constant.layout != torch.strided:
        return count == rows > 1
    of_each = constant.unflatten(0, (rows, -1))
    # of a large mask, two rows tell
    return torch.equal(of_each[0, 0], of_each[-1, 0]) and torch.equal(of_each, of_each[:1].expand_as(of_each))


def _derive(call: Call) -> Any:
    """Run a function of followed values and constants, and follow what it gives."""
    # what it saves is kept as it is, also where activation checkpointing would drop it; FSDP frees the memory of weights
    recorder, first = call.recorder, call.first
    keep = _same if recorder.shards is None else recorder.shards.outliving
    with torch.autograd.graph.saved_tensors_hooks(keep, _same):
        result = call.func(*call.args, **call.kwargs)
    if in_place(call.func):
        if type(first) is Followed:
            first.param, first.seen = None, first._version
        return result

    def follow(item: Any, name: str) -> Any:
        plain = type(item) is not Tensor or not item.requires_grad
        return item if plain else Followed.made(item, name, recorder)

    if type(result) in (list, tuple):
        return type(result)(follow(item, f"{call.key}.{i}") for i, item in enumerate(result))
    return follow(result, call.key)


def _same(tensor: Tensor) -> Tensor:
    return tensor
