"""A small network on the scattering coefficients of an image, which no data have taught.

Wavelets at two scales and eight angles, the modulus, wavelets and modulus again, and a low-pass filter (Bruna & Mallat 2013,
"Invariant scattering convolution networks", section 2; J = 2, L = 8). Tramèr & Boneh 2021 ("Differentially private learning needs
better features (or much more data)", section 3) train on them at small ε: few parameters, and features that cost no privacy.

Coefficients of one order are normalised together for each image, as the group norm there does, but for colours and angles
together. Then each channel is shifted and scaled by constants that come from noise with the spectrum of natural images, 1/f:
public, and equal for all.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.errors import UserError

J, ANGLES = 2, 8
# pixels from one position of the coefficients to the next
STEP = 2**J
# coefficients of order 0, 1 and 2, of each colour and position
ORDERS = (1, J * ANGLES, ANGLES**2)
# Pixels, not the dimension of a colour; luminance and two differences of colours, an orthonormal basis.
_OPPONENT = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))
# how many images of noise give the constants, and how much weaker their colours are than their luminance
_NOISE_IMAGES, _COLOUR = 64, 0.3


def fourier_filters(size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Morlet wavelets and low-pass filters, by their Fourier transforms, which are real.

    With σ = 0.8·2^j, frequency ξ = 3π/4·2^-j and slant 4/L, as Kymatio has them (Andreux et al. 2020); periodic on a square.

    Args:
        size: of the square, a multiple of 4.

    Returns:
        For each scale j the wavelets `[L, size, size]` float32; the low-pass filter on grids of size and size/2.
    """
    wavelets = []
    for j in range(J):
        sigma, xi = 0.8 * 2**j, 0.75 * math.pi / 2**j
        of_scale = []
        for angle in range(ANGLES):
            theta = (ANGLES // 2 - 1 - angle) * math.pi / ANGLES
            bump = _gaussian(size, sigma, theta, ANGLES / 4, xi)
            base = _gaussian(size, sigma, theta, ANGLES / 4, 0.0)
            # so that the mean of a wavelet is 0
            of_scale.append(bump - bump[0, 0] / base[0, 0] * base)
        wavelets.append(torch.stack(of_scale).float())
    low = 0.8 * 2 ** (J - 1)
    passes = [_gaussian(size // 2**r, low / 2**r, 0.0, 1.0, 0.0).float() for r in range(J)]
    return wavelets, passes


def _gaussian(size: int, sigma: float, theta: float, stretch: float, xi: float) -> Tensor:
    """Fourier transform of a Gaussian of width σ along θ and σ·stretch across, times a wave of frequency ξ along θ."""
    grid = 2 * math.pi * torch.fft.fftfreq(size, dtype=torch.float64)
    total = torch.zeros(size, size, dtype=torch.float64)
    for row in range(-2, 3):
        # sampling in space repeats the transform
        for column in range(-2, 3):
            y, x = grid[:, None] + 2 * math.pi * row, grid[None, :] + 2 * math.pi * column
            along = x * math.cos(theta) + y * math.sin(theta) - xi
            across = y * math.cos(theta) - x * math.sin(theta)
            total += torch.exp(-0.5 * sigma**2 * (along**2 + (stretch * across) ** 2))
    return total


def _subsampled(spectrum: Tensor, step: int) -> Tensor:
    """The transform of every `step`-th pixel, of a transform `[..., n, n]`."""
    # sums of slices: a mean over strided dimensions of complex numbers takes three times as long
    for dim in (-2, -1):
        first, *others = spectrum.chunk(step, dim)
        spectrum = first.clone()
        for part in others:
            spectrum += part
    return spectrum / step**2


class Scattering(nn.Module):
    """Scattering coefficients of orders 0, 1 and 2.

    Args:
        shape: channels, height and width of an image; height and width are equal, multiples of 4, and 16 at least.

    Raises:
        UserError: images of another shape.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        _, height, width = shape
        if height != width or height % STEP or height < 4 * STEP:
            raise UserError(
                f"model=scattering needs squares of at least {4 * STEP} pixels, a multiple of {STEP}, and these are "
                f"{width}x{height}: set task.image_size, to 32 for example"
            )
        wavelets, passes = fourier_filters(height + 2 * STEP)
        for j, of_scale in enumerate(wavelets):
            self.register_buffer(f"wavelets{j}", of_scale, persistent=False)
        for r, low in enumerate(passes):
            self.register_buffer(f"low{r}", low, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """`[N, H, W]` to `[N, 81, H/4, W/4]`: order 0, order 1 (scale by angle), order 2 (first angle by second angle)."""
        padded = F.pad(images[:, None], (STEP,) * 4, mode="reflect")[:, 0]
        spectrum = torch.fft.fft2(padded)
        found, second = [self._low(spectrum[:, None], 0)], []
        for j in range(J):
            filters = self.get_buffer(f"wavelets{j}")
            moduli = torch.fft.ifft2(_subsampled(spectrum[:, None] * filters, 2**j)).abs()
            spectra = torch.fft.fft2(moduli)
            found.append(self._low(spectra, j))
            if j == 0:
                finer = self.get_buffer("wavelets1")
                for angle in range(ANGLES):
                    product = _subsampled(spectra[:, angle, None] * finer, 2)
                    second.append(self._low(torch.fft.fft2(torch.fft.ifft2(product).abs()), 1))
        return torch.cat([*found, *second], 1)

    def _low(self, spectrum: Tensor, halvings: int) -> Tensor:
        """Low-passed and subsampled to every fourth pixel of the image, without the padding."""
        passed = _subsampled(spectrum * self.get_buffer(f"low{halvings}"), 2 ** (J - halvings))
        return torch.fft.ifft2(passed).real[..., 1:-1, 1:-1]


class ScatteringClassifier(nn.Module):
    """Scattering coefficients of luminance and colours on a coarse grid, and a small network on them.

    Args:
        shape: of an image.
        classes: outputs.
        grid: positions along each side that coefficients are averaged to; 8 keeps those of 32 pixels.
        widths: filters of convolutions, of 1x1 and then of 3x3, with tanh behind each; none for a linear classifier.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, grid: int = 4, widths: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.scattering = Scattering(shape)
        self.colours, self.grid = shape[0], grid
        self.encoder_settings = {"grid": grid, "scattering": 1}
        basis = torch.tensor(_OPPONENT) if shape[0] == 3 else torch.eye(shape[0])
        self.register_buffer("basis", F.normalize(basis, dim=1), persistent=False)
        noise = self._averaged(_pink_noise(shape))
        self.register_buffer("shift", noise.mean((0, 2, 3), keepdim=True))
        self.register_buffer("scale", noise.std((0, 2, 3), keepdim=True))
        # where other classifiers on features have theirs
        self.dropout = nn.Identity()
        channels = shape[0] * sum(ORDERS)
        layers: list[nn.Module] = [nn.Unflatten(1, (channels, grid, grid))] if widths else []
        for number, (before, width) in enumerate(pairwise((channels, *widths))):
            kernel = 3 if number else 1
            layers += [nn.Conv2d(before, width, kernel, padding=kernel // 2), nn.Tanh()]
        inputs = (widths[-1] if widths else channels) * grid**2
        self.classifier = nn.Sequential(
            *layers, *([nn.Flatten()] if widths else []), nn.Linear(inputs, classes)
        )

    @torch.no_grad()
    def pooled(self, pixel_values: Tensor) -> Tensor:
        """What the network reads, `[B, C·81·grid²]`, of images `[B, C, H, W]`."""
        values = (self._averaged(pixel_values) - self.get_buffer("shift")) / self.get_buffer("scale")
        return values.flatten(1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """`[B, C, H, W]` to logits `[B, classes]`."""
        logits: Tensor = self.classifier(self.dropout(self.pooled(pixel_values)))
        return logits

    def get_classifier(self) -> nn.Module:
        """All that trains."""
        return self.classifier

    @torch.no_grad()
    def _averaged(self, images: Tensor) -> Tensor:
        """`[B, C·81, grid, grid]`, each image and order with mean 0 and variance 1."""
        colours = torch.einsum("kc,bchw->bkhw", self.get_buffer("basis"), images.float())
        raw = self.scattering(colours.flatten(0, 1)).unflatten(0, (len(images), self.colours))
        parts = [F.layer_norm(part, part.shape[1:]) for part in raw.split(ORDERS, dim=2)]
        return F.adaptive_avg_pool2d(torch.cat(parts, 2).flatten(1, 2), self.grid)


def _pink_noise(shape: tuple[int, int, int]) -> Tensor:
    """Images whose amplitude falls as 1/f, as that of natural images does (Field 1987), the same ones every time."""
    channels, height, width = shape
    drawn = torch.Generator().manual_seed(0)
    spectrum = torch.fft.fft2(torch.randn(_NOISE_IMAGES, channels, height, width, generator=drawn))
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width)[None, :])
    images = torch.fft.ifft2(spectrum / frequency.clamp(min=1 / max(height, width))).real
    images = images / images.std()
    if channels != 3:
        return images
    weights = torch.tensor((1.0, _COLOUR, _COLOUR))[:, None] * F.normalize(torch.tensor(_OPPONENT), dim=1)
    return torch.einsum("kc,bkhw->bchw", weights, images)
