"""What a loop of one's own does with memory that it keeps: a buffer for inputs, labels or losses, which each batch is written to.

Whatever name it goes by, what is written there is followed; what an earlier batch has left there counts until it is written over.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpexp.errors import UserError
from tests.training.own_loop import make, train


def cross_entropy(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def run(tmp_path, losses, size=16, **settings):
    """``losses(model, x, y, n, buffer)``; the buffer lives as long as the loop."""
    buffer = torch.zeros(size + 4, 10)

    def of(engine, batch):
        return losses(engine.model, *batch, len(batch[0]), buffer)

    engine = make(tmp_path, **({"batch_size": 24} | settings))
    assert train(engine, size, losses=of).finished
    assert not engine.clipper.notes


def written(model, x, y, n, buffer):
    buffer[:n] = x
    return cross_entropy(model, buffer[:n], y)


def copied(model, x, y, n, buffer):
    buffer[:n].copy_(x)
    return cross_entropy(model, buffer[:n], y)


def by_another_name(model, x, y, n, buffer):
    buffer.detach().narrow(0, 0, n).copy_(x)
    return cross_entropy(model, buffer[:n], y)


def row_by_row(model, x, y, n, buffer):
    for i in range(n):
        buffer[i].copy_(x[i])
    return cross_entropy(model, buffer[:n], y)


def by_columns(model, x, y, n, buffer):
    buffer[:n, :3], buffer[:n, 3:] = x[:, :3], x[:, 3:]
    return cross_entropy(model, buffer[:n], y)


def transposed(model, x, y, n, buffer):
    buffer.t()[:, :n] = x.t()
    return cross_entropy(model, buffer[:n], y)


def added_to_zeros(model, x, y, n, buffer):
    buffer.zero_()
    buffer[:n].add_(x)
    return cross_entropy(model, buffer[:n], y)


def computed_into(model, x, y, n, buffer):
    torch.mul(x, 2, out=buffer[:n])
    return cross_entropy(model, buffer[:n], y)


def drawn(model, x, y, n, buffer):
    buffer.normal_()
    return cross_entropy(model, x + buffer[:n], y)


def targets(model, x, y, n, buffer):
    buffer.zero_()
    buffer[:n, :3].scatter_(1, y[:, None], 1.0)
    return -(model(x).log_softmax(1) * buffer[:n, :3]).sum(1)


def for_a_log(model, x, y, n, buffer):
    losses = cross_entropy(model, x, y)
    buffer[0].mul_(0.9)
    buffer[0, 0] += losses.detach().sum()
    return losses


@pytest.mark.parametrize(
    "losses",
    [
        written, copied, by_another_name, row_by_row, by_columns, transposed, added_to_zeros, computed_into, drawn, targets,
        for_a_log,
    ],
)  # fmt: skip
def test_a_buffer_that_each_batch_is_written_to_is_taken(tmp_path, losses):
    run(tmp_path, losses)


def centred(x):
    return x - x.mean(0)


def into_a_slice(x, n, buffer):
    buffer[:n].copy_(centred(x))
    return buffer[:n]


def as_data(x, n, buffer):
    buffer.data[:n] = centred(x)
    return buffer[:n]


def flattened(x, n, buffer):
    buffer.view(-1)[: 10 * n] = centred(x).flatten()
    return buffer[:n]


def by_out(x, n, buffer):
    torch.sub(x, x.mean(0), out=buffer[:n])
    return buffer[:n]


def in_parts(x, n, buffer):
    for part, own in zip(buffer[:n].split(4), centred(x).split(4), strict=True):
        part.copy_(own)
    return buffer[:n]


def with_another_memory(x, n, buffer):
    made = torch.zeros(n, 10)
    made.data = centred(x)
    return made


def one_beside(x, n, buffer):
    buffer[:n] = x
    buffer[1 : n + 1] += x
    return buffer[:n]


@pytest.mark.parametrize(
    "entering",
    [into_a_slice, as_data, flattened, by_out, in_parts, with_another_memory, one_beside],
)
@pytest.mark.parametrize("new", [False, True])
def test_what_is_written_to_a_buffer_is_followed(tmp_path, entering, new):
    def losses(model, x, y, n, buffer):
        return cross_entropy(model, entering(x, n, torch.zeros(20, 10) if new else buffer), y)

    with pytest.raises(UserError, match="mixes examples before they enter"):
        run(tmp_path, losses)


def what_is_not_written_over(x, n, buffer):
    buffer[: n - 1] = x[1:]
    entering = x + buffer[n - 1 : n]
    buffer[:n] = x
    return entering


def before_it_is_written_over(x, n, buffer):
    entering = x + buffer[:1]
    buffer[:n] = x
    buffer.zero_()
    buffer[1 : n + 1] = x
    return entering


def over_what_is_copied_elsewhere(x, n, buffer):
    other = torch.zeros(64, 10)
    other[:n].copy_(buffer[:n])
    buffer[:n] = x
    return x + other[:n]


def of_the_last_one(x, n, buffer):
    entering = x + torch.where(torch.arange(n)[:, None] == 0, buffer[:n], 0)
    buffer[:n] = x
    return entering


@pytest.mark.parametrize(
    "entering",
    [what_is_not_written_over, before_it_is_written_over, over_what_is_copied_elsewhere, of_the_last_one],
)
def test_what_an_earlier_batch_has_left_in_a_buffer_is_refused(tmp_path, entering):
    def losses(model, x, y, n, buffer):
        return cross_entropy(model, entering(x, n, buffer), y)

    with pytest.raises(UserError, match="an earlier batch has left behind"):
        # 60 rows: no batch is smaller than what it leaves
        run(tmp_path, losses, size=60)


def test_losses_in_a_buffer_are_followed(tmp_path):
    def losses(model, x, y, n, buffer):
        found = cross_entropy(model, x, y)
        kept = torch.zeros(20)
        kept[:n].copy_(found.detach())
        return found / kept[:n].max()

    with pytest.raises(UserError, match="mixes examples: the loss of one"):
        run(tmp_path, losses)


def normalised(model, x, y):
    values = x.numpy()
    return cross_entropy(model, torch.from_numpy((values - values.mean(0)) / values.std()), y)


def weighted_by_counts(model, x, y):
    shares = 1 / np.bincount(y.numpy())[y.numpy()]
    return cross_entropy(model, x, y) * torch.tensor(shares, dtype=torch.float32)


def weighted_by_python(model, x, y):
    numbers = y.tolist()
    return cross_entropy(model, x, y) / torch.tensor([1.0 + numbers.count(number) for number in numbers])


def measured(model, x, y):
    outputs = model(x)
    np.mean(outputs.detach().numpy().argmax(1) == y.numpy())
    return nn.functional.cross_entropy(outputs, y, reduction="none") * torch.ones(len(y))


def scaled(x):
    return x - x.mean(0)


def in_another_thread(model, x, y):
    with ThreadPoolExecutor(1) as threads:
        return cross_entropy(model, threads.submit(scaled, x).result(), y)


def with_noise(model, x, y):
    np.asarray(x).mean()
    return cross_entropy(model, x + 0.1 * torch.randn(len(x), 10), y) * (1 + torch.rand(len(y)))


@pytest.mark.parametrize(
    ("losses", "noted"),
    [
        (normalised, True),
        (weighted_by_counts, True),
        (weighted_by_python, True),
        (in_another_thread, True),
        (measured, False),
        (with_noise, False),
    ],
)
def test_it_is_said_where_something_is_made_of_a_batch_that_nobody_sees(tmp_path, losses, noted):
    engine = make(tmp_path)
    train(engine, losses=lambda engine, batch: losses(engine.model, *batch))
    assert any("by other means" in note for note in engine.clipper.notes) == noted


def by_index(model, x, y, n, buffer):
    buffer[torch.arange(n)] = x
    return cross_entropy(model, buffer.index_select(0, torch.arange(n)), y)


def by_index_copy(model, x, y, n, buffer):
    buffer.index_copy_(0, torch.arange(n), x)
    return cross_entropy(model, buffer[torch.arange(len(buffer)) < n], y)


def resized(model, x, y, n, buffer):
    buffer.resize_(n, 10).copy_(x)
    return cross_entropy(model, buffer, y)


def resized_by_out(model, x, y, n, buffer):
    torch.mul(x, 2, out=buffer)
    return cross_entropy(model, buffer, y)


def as_variables(model, x, y, n, buffer):
    return cross_entropy(model, torch.autograd.Variable(x), torch.autograd.Variable(y))


@pytest.mark.parametrize("losses", [by_index, by_index_copy, resized, resized_by_out, as_variables])
def test_what_is_written_over_by_index_or_resized_or_has_another_name_is_taken(tmp_path, losses):
    run(tmp_path, losses, size=24)


def several_at_once(x, n, buffer):
    other = torch.zeros(n, 10)
    torch._foreach_copy_([buffer[:n], other], [x, centred(x)])
    return other


def as_old_classes(x, n, buffer):
    return torch.FloatTensor(centred(x))


def set_to(x, n, buffer):
    made = torch.empty(0)
    made.set_(centred(x))
    return made


def in_part(x, n, buffer):
    made = centred(x)
    return torch.empty(0).set_(made.untyped_storage(), 0, (n, 5)).repeat(1, 2)


@pytest.mark.parametrize(
    ("entering", "seen"),
    [(several_at_once, True), (as_old_classes, True), (set_to, True), (in_part, False)],
)
def test_what_is_written_or_named_without_a_call_of_its_own_is_followed(tmp_path, entering, seen):
    def losses(model, x, y, n, buffer):
        return cross_entropy(model, entering(x, n, buffer), y)

    if seen:
        with pytest.raises(UserError, match="mixes examples before they enter"):
            run(tmp_path, losses)
    else:
        with pytest.raises(AssertionError, match="not looked at"):
            run(tmp_path, losses)


def test_what_a_batch_before_the_last_one_has_left_is_refused(tmp_path):
    bank = []

    def losses(model, x, y, n, buffer):
        bank.append(x.clone())
        return cross_entropy(model, x + bank[-3].mean(0) if len(bank) > 2 else x, y)

    with pytest.raises(UserError, match="an earlier batch has left behind"):
        run(tmp_path, losses)


def test_two_buffers_in_turn_hold_what_an_earlier_batch_has_left(tmp_path):
    buffers = [torch.zeros(30, 10), torch.zeros(30, 10)]

    def losses(model, x, y, n, buffer):
        buffers.reverse()
        entering = x + buffers[0].mean(0)
        buffers[0][:n] = x
        return cross_entropy(model, entering, y)

    with pytest.raises(UserError, match="an earlier batch has left behind"):
        run(tmp_path, losses)


def test_values_of_a_batch_are_not_written_to_several_parameters_at_once(tmp_path):
    def losses(model, x, y, n, buffer):
        found = cross_entropy(model, x, y)
        with torch.no_grad():
            torch._foreach_copy_([buffer[0, :3], model[3].bias], [x[0, :3], x[0, :3]])
        return found

    with pytest.raises(UserError, match="writes values of its batch to"):
        run(tmp_path, losses)


def test_what_an_earlier_batch_has_left_is_followed_to_new_memory(tmp_path):
    def losses(model, x, y, n, buffer):
        entering = torch.zeros(n, 10)
        entering.copy_(x + buffer.mean(0))
        buffer[:n] = x
        return cross_entropy(model, entering, y)

    with pytest.raises(UserError, match="an earlier batch has left behind"):
        run(tmp_path, losses)


def by_its_data(made, kept):
    made.data.add_(kept)
    return made


def by_a_view_that_was_made_before(made, kept):
    view = made.view(len(made), 10)
    made.add_(kept)
    return view


@pytest.mark.parametrize("written", [by_its_data, by_a_view_that_was_made_before])
def test_what_an_earlier_batch_has_left_is_followed_by_each_name(tmp_path, written):
    def losses(model, x, y, n, buffer):
        entering = written(x * 2, buffer.mean(0))
        buffer[:n] = x
        return cross_entropy(model, entering, y)

    with pytest.raises(UserError, match="an earlier batch has left behind"):
        run(tmp_path, losses)


class Anchored(nn.Module):
    """Has public rows in two buffers, which are one memory."""

    def __init__(self, public):
        super().__init__()
        self.linear = nn.Linear(len(public), 3)
        self.register_buffer("anchors", public)
        self.register_buffer("same", public[:])

    def forward(self, x):
        return self.linear(x @ self.anchors.T)


def test_no_file_of_a_model_holds_private_rows_that_lie_beside_its_public_ones(tmp_path):
    rows = torch.randn(200, 10)
    model = Anchored(rows[:4])
    private = TensorDataset(rows[4:], torch.zeros(196, dtype=torch.long))
    engine = train(make(tmp_path / "run", model, dataset=private))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    engine.save(tmp_path / "saved")
    for file in tmp_path.rglob("*.pt"):
        assert rows[4].numpy().tobytes() not in file.read_bytes()
    assert torch.equal(model.anchors, rows[:4])
    assert model.anchors.data_ptr() == model.same.data_ptr() != rows.data_ptr()
