"""What rows tell of how they were made, before the engine has seen them: copies, and scales taken from themselves."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

# fewer rows have such statistics by chance
FEWEST = 20
# bytes; to go through more takes longer than a person likes to wait for a warning
MOST = 1 << 30
EQUAL = (
    "{count} of {rows} examples are equal to another one: where they are copies of one (a rare class that was put in several "
    "times), privacy protects each copy by itself. Give every example once, with a weight in its loss where it is to count more; "
    "or say whose each copy is: users="
)
FITTED = (
    "that epsilon is all that is told of the rows: columns of a tensor of shape {shape} in the data set have mean 0 and standard "
    "deviation 1 over exactly these rows, as if they were scaled by their own. Who uses the model needs those two numbers, and "
    "nothing protects them. Scale by public data, or by bounds that are known without looking"
)


def tensors_of(dataset: Any) -> tuple[Tensor, ...]:
    """Give the tensors that hold an example in each row; none of a data set of another kind, or of more than `MOST` bytes."""
    if isinstance(dataset, Subset):
        places = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return tuple(tensor[places.to(tensor.device)] for tensor in tensors_of(dataset.dataset))
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
    plain = all(isinstance(t, Tensor) and t.layout == torch.strided and not t.is_nested for t in tensors)
    return tuple(tensors) if plain and sum(t.nbytes for t in tensors) <= MOST else ()


def equal_rows(dataset: Any) -> str | None:
    """Say how many examples of tensors or of a `datasets.Dataset` are equal to another one; None where there are none."""
    hashes = np.fromiter(map(hash, contents(dataset)), np.int64)
    counts = np.unique(hashes, return_counts=True)[1]
    copies = int(counts[counts > 1].sum())
    return EQUAL.format(count=copies, rows=len(hashes)) if copies else None


def contents(dataset: Any) -> Iterator[Hashable]:
    """Give for each example something that is equal for equal ones; nothing of another kind of data set."""
    if hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):
        if dataset.data.nbytes > MOST:
            return
        for rows in dataset.with_format("arrow").iter(batch_size=1000):
            yield from map(repr, zip(*(column.to_pylist() for column in rows.columns), strict=True))
        return
    plain = [t.detach().cpu().contiguous().reshape(len(t), -1) for t in tensors_of(dataset) if t.numel()]
    for row in zip(*(t.view(torch.uint8).numpy() for t in plain), strict=True):
        yield tuple(part.tobytes() for part in row)


def fitted_to_itself(tensors: tuple[Tensor, ...]) -> str | None:
    """Say which tensor has columns that were standardised by their own rows; None where none has."""
    for tensor in tensors:
        if len(tensor) < FEWEST or tensor.dtype not in (torch.float32, torch.float64) or not tensor.numel():
            continue
        columns = tensor.detach().reshape(len(tensor), -1)
        # by a product, which takes a tenth of the time of exact means; few columns are left for these
        rough = columns.new_full((len(columns),), 1 / len(columns)) @ columns
        columns = columns[:, rough.abs() < 1e-4].double()
        square = columns.square().mean(0)
        # a sample's variance divides by one less
        exact = (columns.mean(0).abs() < 1e-5) & ((square - 1).abs() < 1e-4 + 1.5 / len(columns))
        # of whole numbers (-1 and 1) this may be a design
        if (columns[:, exact] % 1 != 0).any():
            return FITTED.format(shape=list(tensor.shape))
    return None
