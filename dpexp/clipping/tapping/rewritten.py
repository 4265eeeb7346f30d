"""Modules whose own forward hides its parameters inside one fused call, written out as ordinary linear maps and lookups.

`nn.LSTM`, `nn.GRU`, `nn.RNN`, their cells and `nn.EmbeddingBag` hand their weights to a single C++ function, where no tap can
go. These forwards compute the same with ``F.linear`` and ``F.embedding``, whose parameters `following` follows; so does what
stands for `F.multi_head_attention_forward`, the function of `nn.MultiheadAttention` and of modules of one's own. What they don't
cover (key and value biases, inputs without a batch) runs natively and is left to the per-example loop: exact, and slow.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import wrap_torch_function

Forward = Callable[..., Any]
# of the state at a time
Product = Callable[[Tensor, int], Tensor]


ATTENTION = inspect.signature(F.multi_head_attention_forward)


def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Attention over ``[T, B, E]``, with boolean (True: hidden) or additive masks."""
    bound = ATTENTION.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    more = (given.bias_k, given.bias_v, given.static_k, given.static_v)
    if given.query.dim() != 3 or given.add_zero_attn or any(part is not None for part in more):
        return NotImplemented
    same = given.query is given.key and given.key is given.value
    query, key, value = (x.transpose(0, 1) for x in (given.query, given.key, given.value))
    weight, bias = given.in_proj_weight, given.in_proj_bias
    if same and not given.use_separate_proj_weight:
        q, k, v = F.linear(query, weight, bias).chunk(3, dim=-1)
    else:
        separate = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
        weights = separate if given.use_separate_proj_weight else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    # [B, H, T, E / H]
    q, k, v = (x.unflatten(-1, (given.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = _attention_mask(given.attn_mask, given.key_padding_mask, q, k)
    dropout = given.dropout_p if given.training else 0.0
    attended: Tensor | None = None
    if given.need_weights:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        attended = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
        out = attended @ v
        attended = attended.mean(dim=1) if given.average_attn_weights else attended
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    out = F.linear(out.transpose(1, 2).flatten(2), given.out_proj_weight, given.out_proj_bias)
    return out.transpose(0, 1), attended


def _attention_mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Both masks as one additive mask that broadcasts over ``[B, H, T, S]``."""
    batch, heads, length = q.shape[:3]

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)
        return mask.to(q.dtype)

    total = None
    if attn_mask is not None:
        total = additive(attn_mask)
        if total.dim() == 3:
            total = total.view(batch, heads, length, k.shape[2])
    if padding is not None:
        hidden = additive(padding)[:, None, None, :]
        total = hidden if total is None else total + hidden
    return total


def recurrent(self: nn.RNNBase, x: Any, hx: Any = None) -> Any:
    """LSTM, GRU and RNN over ``[B, T, d]`` (``[T, B, d]`` without ``batch_first``) or packed sequences, any number of layers and
    directions."""
    packed, there = x if isinstance(x, PackedSequence) else None, None
    if packed is not None:
        x, lengths = pad_packed_sequence(packed, batch_first=True)
        # [T, B, 1]: whether the sequence is that long
        there = (torch.arange(x.shape[1])[:, None, None] < lengths[:, None]).to(x.device)
    elif not isinstance(x, Tensor) or x.dim() != 3:
        return NotImplemented
    elif not self.batch_first:
        x = x.transpose(0, 1)
    directions = 2 if self.bidirectional else 1
    batch, is_lstm = x.shape[0], isinstance(self, nn.LSTM)
    if hx is None:
        hidden = x.new_zeros(self.num_layers * directions, batch, self.proj_size or self.hidden_size)
        cell = x.new_zeros(self.num_layers * directions, batch, self.hidden_size)
    else:
        hidden, cell = hx if is_lstm else (hx, hx)
    last_hidden, last_cell = [], []
    for layer in range(self.num_layers):
        outputs = []
        for direction in range(directions):
            index, name = layer * directions + direction, f"l{layer}{'_reverse' if direction else ''}"
            given, mask = x, there
            if direction:
                # a sequence that ends early begins late from behind
                given, mask = x.flip(1), None if there is None else there.flip(0)
            y, h, c = _one_direction(self, given, mask, hidden[index], cell[index], name)
            outputs.append(y.flip(1) if direction else y)
            last_hidden.append(h)
            last_cell.append(c)
        x = torch.cat(outputs, dim=-1)
        if layer < self.num_layers - 1:
            x = F.dropout(x, self.dropout, self.training)
    state = torch.stack(last_hidden)
    if packed is not None:
        x = _packed_like(packed, x, lengths)
    elif not self.batch_first:
        x = x.transpose(0, 1)
    return x, ((state, torch.stack(last_cell)) if is_lstm else state)


def _packed_like(packed: PackedSequence, y: Tensor, lengths: Tensor) -> PackedSequence:
    """``[B, T, ·]`` packed as the input was."""
    if (order := packed.sorted_indices) is not None:
        y, lengths = y.index_select(0, order), lengths[order.to(lengths.device)]
    data = pack_padded_sequence(y, lengths, batch_first=True).data
    return PackedSequence(data, packed.batch_sizes, order, packed.unsorted_indices)


def _one_direction(
    module: nn.RNNBase, x: Tensor, there: Tensor | None, h: Tensor, c: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction: outputs ``[B, T, ·]`` and the last hidden and cell states.

    The states are computed twice, first without a graph: so each weight meets the states of all times in one product, with one
    tap. In the second pass a step takes its values from that product, and gradients go from state to state by `_routed`.
    """
    step = _step_of(module)

    def read(part: str) -> Any:
        return getattr(module, f"{part}_{name}") if hasattr(module, f"{part}_{name}") else None

    w_ih, w_hh, b_ih, b_hh, w_hr = (
        read(part) for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    )
    inputs = F.linear(x, w_ih, b_ih).unbind(1)

    def states(h: Tensor, c: Tensor, recur: Product, project: Product) -> tuple[list[Tensor], ...]:
        """Hidden states and cells of all times, the first ones in front, and what is projected to hidden states."""
        hidden, cells, wide = [h], [c], []
        for t, given in enumerate(inputs):
            y, new_c = step(module, given, recur(h, t), h, c)
            new_h = project(y, t)
            if there is not None:
                new_h, new_c = torch.where(there[t], new_h, h), torch.where(there[t], new_c, c)
            h, c = new_h, new_c
            hidden.append(h)
            cells.append(c)
            wide.append(y)
        return hidden, cells, wide

    with torch.no_grad():
        constants: Any = [None if value is None else value.detach() for value in (w_hh, b_hh, w_hr)]
        w, b, p = constants
        hidden, _, wide = states(
            h.detach(), c, lambda h, _: F.linear(h, w, b), lambda y, _: y if p is None else F.linear(y, p)
        )
    recurred = F.linear(torch.stack(hidden[:-1], dim=1), w_hh, b_hh).unbind(1)
    projected = () if p is None else F.linear(torch.stack(wide, dim=1), w_hr).unbind(1)
    hidden, cells, _ = states(
        h,
        c,
        lambda h, t: _routed(recurred[t], h, w),
        lambda y, t: y if p is None else _routed(projected[t], y, p),
    )
    return torch.stack(hidden[1:], dim=1), hidden[-1], cells[-1]


def cell(self: nn.RNNCellBase, x: Tensor, hx: Any = None) -> Any:
    """One step of an LSTM, a GRU or an RNN, from ``[B, d]``."""
    if x.dim() != 2:
        return NotImplemented
    is_lstm = isinstance(self, nn.LSTMCell)
    if hx is None:
        hx = x.new_zeros(len(x), self.hidden_size)
        hx = (hx, hx) if is_lstm else hx
    h, c = hx if is_lstm else (hx, hx)
    given, recurred = F.linear(x, self.weight_ih, self.bias_ih), F.linear(h, self.weight_hh, self.bias_hh)
    found = _step_of(self)(self, given, recurred, h, c)
    return found if is_lstm else found[0]


def _routed(product: Tensor, x: Tensor, weight: Any) -> Tensor:
    """The known product of ``x`` and a weight: ``x`` gets its gradient through the constant weight, the weight through the
    product."""
    return product + F.linear(x - x.detach(), weight)


def _step_of(module: nn.Module) -> Any:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return _lstm_step
    return _gru_step if isinstance(module, nn.GRU | nn.GRUCell) else _rnn_step


def _lstm_step(module: Any, x: Tensor, g: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, n, o = (x + g).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * n.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(module: Any, x: Tensor, g: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    (xr, xz, xn), (gr, gz, gn) = x.chunk(3, dim=-1), g.chunk(3, dim=-1)
    z = (xz + gz).sigmoid()
    n = (xn + (xr + gr).sigmoid() * gn).tanh()
    return (1 - z) * n + z * h, c


def _rnn_step(module: Any, x: Tensor, g: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return ((x + g).tanh() if module.nonlinearity == "tanh" else (x + g).relu()), c


def embedding_bag(
    self: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Any:
    """Sums, means or maxima over bags of rows: ``[B, T]`` ids, or ids end to end and where each bag begins."""
    weights = per_sample_weights
    if not input.numel() or (weights is not None and weights.requires_grad):
        return NotImplemented
    if input.dim() == 2:
        ids, there = input, torch.ones_like(input, dtype=torch.bool)
    elif offsets is None:
        return NotImplemented
    else:
        last = self.include_last_offset
        there, ids = _places(input, offsets, last) >= 0, _by_bag(input, offsets, last)
        weights = None if weights is None else _by_bag(weights, offsets, last)
    if self.padding_idx is not None:
        there = there & (ids != self.padding_idx)
    rows, there = F.embedding(ids, self.weight), there[..., None]
    if self.mode == "max":
        found = torch.where(there, rows, -math.inf).max(1).values
        return torch.where(there.any(1), found, 0.0)
    total = torch.where(there, rows if weights is None else rows * weights[..., None], 0.0).sum(1)
    return total if self.mode == "sum" else total / there.sum(1).clamp(min=1)


# whoever watches the forward sees one function, which keeps the rows in their order, and not how it picks what belongs to them
@wrap_torch_function(lambda given, offsets, last: (given, offsets))
def _places(given: Tensor, offsets: Tensor, last: bool) -> Tensor:
    """``[B, T]``: where the numbers of each bag stand among those of all; -1 behind the last one."""
    ends = torch.cat([offsets[1:], offsets.new_tensor([] if last else [len(given)])])
    begins = offsets[: len(ends), None]
    places = begins + torch.arange(int((ends[:, None] - begins).max()), device=offsets.device)
    return torch.where(places < ends[:, None], places, -1)


@wrap_torch_function(lambda given, offsets, last: (given, offsets))
def _by_bag(given: Tensor, offsets: Tensor, last: bool) -> Tensor:
    """``[B, T]``: numbers end to end, a row for each bag; 0 behind the last one."""
    places = _places(given, offsets, last)
    return torch.where(places >= 0, given[places], 0)


REWRITTEN: dict[type[nn.Module], Forward] = {
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.RNN: recurrent,
    nn.LSTMCell: cell,
    nn.GRUCell: cell,
    nn.RNNCell: cell,
    nn.EmbeddingBag: embedding_bag,
}
REWRITTEN_FUNCTIONS: dict[Any, Forward] = {F.multi_head_attention_forward: multi_head_attention}
