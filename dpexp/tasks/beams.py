"""Beam search that divides a beam's log-probability by the length of prompt and text together (`beam_length=whole`).

So transformers did when Li et al. made their numbers; today it divides by the new tokens alone. With a prompt in the length, a
longer text gains less from its length, so that shorter texts win. `length_penalty` is the exponent of the length in both.

The old rules, kept to the letter (`BeamSearchScorer` and `BeamHypotheses` of transformers 4.8):

* A text that the model ends is scored without its end token; one that is cut off at the longest length is scored whole.
* At the longest length every beam that still runs is scored; today only those among the best `num_beams` candidates are.
* The search for a prompt is over when its worst finished text is at least as good as the best candidate of the last step, ended
  or not, over the length before that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import UserError

# of the library's beam search
FINISH, GO_ON = "_update_finished_beams", "_check_early_stop_heuristic"
UNDECIDED = "is_early_stop_heuristic_unsatisfied"


@contextmanager
def whole_lengths(model: nn.Module, padding: Tensor, end: int, penalty: float) -> Iterator[None]:
    """Let `model.generate` score beams by their whole length while the context lasts.

    Args:
        model: of transformers, plain or wrapped by peft; afterwards it is as it was.
        padding: `[rows]` int64, the padding in front of each prompt, which counts for nothing.
        end: the token that ends a text.
        penalty: exponent of the length.

    Raises:
        UserError: this version of transformers has no beam search that can be told so.
    """
    searching = next(
        (m for m in model.modules() if hasattr(type(m), FINISH) and hasattr(type(m), GO_ON)), None
    )
    if searching is None:
        raise UserError(
            "task.generation.beam_length=whole works on the beam search of transformers 5, which this model or this version does "
            "not have: leave it at target"
        )
    finish: Any = getattr(searching, FINISH)
    # [rows, 1], of the candidates of the last step
    best = torch.zeros(0)

    def improvable(scores: Tensor, is_finished: Tensor, length: int) -> Tensor:
        """`[rows, 1]`: whether the best candidate of a step from this length could still beat a finished text."""
        full, worst = is_finished.all(1, keepdim=True), scores.amin(1, keepdim=True)
        return ~full | (best / (length - padding[:, None]) ** penalty > worst)

    def finished(**arguments: Any) -> Any:
        nonlocal best
        scores, length = arguments["topk_log_probs"], arguments["cur_len"]
        best = scores.amax(1, keepdim=True)
        ended = arguments["topk_running_sequences"][:, :, length] == end
        hits, first = arguments["next_token_hits_stopping_criteria"], arguments["top_num_beam_mask"]
        lengths = length - padding[:, None] + (~ended).long()

        def add(new: Tensor, **changed: Any) -> Any:
            """Let the pools take in the new texts."""
            scored = {"topk_log_probs": scores / lengths**penalty, "length_penalty": 0.0}
            chosen = {"next_token_hits_stopping_criteria": new, "top_num_beam_mask": torch.ones_like(first)}
            return finish(**arguments | scored | chosen | changed)

        found = add(hits & ended & first[None, :])
        cut_off = hits & ~ended & ((~ended).cumsum(1) <= arguments["num_beams"])
        if not cut_off.any():
            return found
        state = dict(
            zip(("sequences", "beam_scores", "beam_indices", "is_sent_finished"), found, strict=True)
        )
        going_on = arguments[UNDECIDED] & improvable(state["beam_scores"], state["is_sent_finished"], length)
        return add(cut_off, **state, **{UNDECIDED: going_on})

    def go_on(**arguments: Any) -> Tensor:
        before = arguments["cur_len"] - 1
        possible = improvable(arguments["beam_scores"], arguments["is_sent_finished"], before)
        undecided: Tensor = arguments[UNDECIDED] & possible
        return undecided

    setattr(searching, FINISH, finished)
    setattr(searching, GO_ON, go_on)
    try:
        yield
    finally:
        delattr(searching, FINISH)
        delattr(searching, GO_ON)
