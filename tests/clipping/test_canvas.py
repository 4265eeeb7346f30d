"""Images of several sizes beside a mask: how large their canvas is may not move an image."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from dpexp import PrivacyEngine
from dpexp.errors import UserError
from tests.clipping.stepping import step

SIZES = [(12, 16), (6, 16), (12, 8), (8, 10), (4, 4)]


class OfImages(nn.Module):
    """Reads ``[B, 3, H, W]`` beside a mask ``[B, H, W]``: two convolutions, and a mean over the pixels of an image."""

    def __init__(self, masked: bool, inside: bool = True, maps: bool = False):
        super().__init__()
        self.masked, self.inside, self.maps = masked, inside, maps
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> Tensor:
        mask = (pixel_mask == self.inside)[:, None, ::2, ::2].to(pixel_values.dtype)
        found = torch.tanh(self.first(pixel_values))
        found = self.second(found * mask if self.masked else found) * mask
        return found if self.maps else found.sum((2, 3)) / mask.sum((2, 3))


def images(sizes, inside=True, beside=0.0, seed=0):
    draws = torch.Generator().manual_seed(seed)
    tall, wide = (max(size) for size in zip(*sizes, strict=True))
    pixels = torch.full((len(sizes), 3, tall, wide), beside)
    mask = torch.full((len(sizes), tall, wide), not inside)
    for i, (height, width) in enumerate(sizes):
        pixels[i, :, :height, :width] = torch.randn(3, height, width, generator=draws)
        mask[i, :height, :width] = inside
    return pixels, mask


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_larger_canvas_may_not_move_an_image(masked, maps, inside):
    model = OfImages(masked, inside, maps).double()
    pixels, mask = images(SIZES, inside)
    said = pytest.raises(UserError, match=r"one larger image would do.*a mask behind each convolution")
    with nullcontext() if masked else said:
        step(model, pixels.double(), mask)


def test_a_canvas_whose_images_all_fill_it_is_one_size():
    step(OfImages(masked=False), *images([(8, 8)] * 4))
    with pytest.raises(UserError, match="one larger image"):
        step(OfImages(masked=False), *images(SIZES, beside=0.5))
    model = OfImages(masked=False)
    clipper = step(model, *images([(12, 16)] * 5), fixed_length=True)
    with pytest.raises(UserError, match="has 3 x 12 x 8 columns now and had 3 x 12 x 16 before"):
        model(*images([(12, 8)] * 5))
    clipper.detach()


@pytest.mark.parametrize("masked", [True, False])
def test_what_images_are_padded_with_is_seen_in_a_loop_without_a_mask(tmp_path, masked):
    class Averaged(OfImages):
        def forward(self, pixels: Tensor) -> Tensor:
            return super().forward(
                pixels, (pixels != -1).any(1) if self.masked else torch.ones_like(pixels[:, 0]) == 1
            )

    def together(rows):
        pixels, _ = images([row.shape[1:] for row in rows], beside=-1.0)
        for here, row in zip(pixels, rows, strict=True):
            here[:, : row.shape[1], : row.shape[2]] = row
        return pixels

    torch.manual_seed(0)
    data = [torch.randn(3, *SIZES[i % 5]) for i in range(20)]
    model = Averaged(masked)
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, folder=tmp_path, data_name="images", batch_size=8, steps=2,
        noise_multiplier=1.0, delta=1e-5, clip_norm=1.0,
    )  # fmt: skip
    with nullcontext() if masked else pytest.raises(UserError, match="one larger image"):
        for pixels in engine.batches(together, physical_batch_size=8):
            engine.step(engine.model(pixels).square().sum(1))


def test_images_of_one_size_beside_padded_series_are_taken(tmp_path):
    """They hold the number that the series are padded with, and no larger image can come."""

    class Both(OfImages):
        def forward(self, pixels: Tensor, series: Tensor) -> Tensor:
            return super().forward(pixels, torch.ones_like(pixels[:, 0]) == 1) + series.sum(1)

    def together(rows):
        pixels, series = zip(*rows, strict=True)
        return torch.stack(pixels), nn.utils.rnn.pad_sequence(series, batch_first=True)

    torch.manual_seed(0)
    digits = nn.functional.pad(torch.randn(20, 3, 8, 8), (0, 4, 0, 4))
    data = [(pixels, torch.randn(2 + i % 4, 4)) for i, pixels in enumerate(digits)]
    model = Both(masked=False)
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, folder=tmp_path, data_name="both", batch_size=8, steps=2,
        noise_multiplier=1.0, delta=1e-5, clip_norm=1.0,
    )  # fmt: skip
    for batch in engine.batches(together, physical_batch_size=8):
        engine.step(engine.model(*batch).square().sum(1))
    assert engine.finished


@pytest.mark.parametrize("kind", ["holes", "beside"])
def test_a_mask_that_is_none_of_padding_is_left_alone(kind):
    pixels, mask = images(SIZES)
    if kind == "holes":
        # what is to be painted
        mask[:, 2:4, 2:4] = False
    else:
        # of the next row's images, say
        pixels[:, :, -1, -1] = torch.randn(len(SIZES), 3)
    step(OfImages(masked=False), pixels, mask)
