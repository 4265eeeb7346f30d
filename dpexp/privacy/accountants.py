"""From an event and δ to ε, in four ways.

========  =================================================================================================
rdp       Rényi DP (Mironov 2017): an upper bound; what He et al. and Li et al. calibrate with
prv       privacy random variables (Gopi, Lee & Wutschitz 2021), ``prv_accountant``: the upper end of its error interval
pld       privacy loss distributions by connect-the-dots, ``dp_accounting``: a pessimistic, tight bound
gdp       Gaussian DP by its central limit theorem (Dong, Roth & Su 2019; Bu et al. 2020): an approximation that
          may under-estimate, never a guarantee
========  =================================================================================================

Gaussians without sampling are one Gaussian; prv, pld and gdp then all give the exact closed form.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType

from dp_accounting import DpEvent, NeighboringRelation, UnsupportedEventError
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant

from dpexp.errors import UserError
from dpexp.privacy.events import REPLACE_ONE, Releases, coarsen, neighbouring, releases, without_noise
from dpexp.privacy.gaussian import gaussian_epsilon
from dpexp.privacy.losses import lost_to_rounding, self_composed
from dpexp.privacy.projected import projected, projected_epsilon
from dpexp.privacy.renyi import renyi_epsilon

# Beyond this both libraries work with e^ε near overflow; no such ε means anything, and "inf" says so.
LARGEST_EPSILON = 500.0
# How many kinds of release are composed as they are; more are rounded towards a larger ε (prv takes seconds for each).
_KINDS = {"rdp": 96, "gdp": 1 << 62, "prv": 12, "pld": 48}
_GRID_POINTS = 1 << 19
# Of the Rényi curve for fixed sizes, whose time goes with the square of an order.
_ORDERS = (1.1, 1.25, 1.5, 1.75, *range(2, 33), *range(34, 65, 2), 80, 96, 128, 160, 192, 256)


def epsilon(event: DpEvent, delta: float, accountant: str = "rdp") -> float:
    """ε of everything in the event at δ; may be inf, never NaN.

    0 <= δ < 1. Raises `UserError` for a δ outside, an unknown accountant, or an event that the accountant
    cannot treat."""
    check_delta(delta)
    if accountant not in ACCOUNTANTS:
        raise UserError(f"accountant={accountant} is not a choice; choices: {', '.join(ACCOUNTANTS)}")
    parts = releases(event)
    if parts is None:
        if (kinds := projected(event)) is not None:
            if accountant != "pld":
                raise UserError(
                    f"accountant={accountant} cannot treat norms that are estimated, which may be too small by any factor: its "
                    "epsilon would be infinite or wrong; choose pld"
                )
            return projected_epsilon(kinds, delta)
        return _by_library(event, delta, accountant)
    if not parts:
        return 0.0
    if delta == 0 or any(sigma == 0 for _, sigma in parts):
        return math.inf
    value = _computed(accountant, tuple(coarsen(parts, _KINDS[accountant]).items()), delta)
    return math.inf if math.isnan(value) else max(0.0, value)


@lru_cache(maxsize=256)
def _computed(accountant: str, parts: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    """Once: a ledger, a plan and a record ask for the same number, which takes some accountants seconds."""
    return float(ACCOUNTANTS[accountant](dict(parts), delta))


def epsilons(event: DpEvent, delta: float) -> dict[str, float | None]:
    """ε under every accountant; None where one cannot treat the event."""
    found: dict[str, float | None] = {}
    check_delta(delta)
    for name in ACCOUNTANTS:
        try:
            found[name] = epsilon(event, delta, name)
        except UserError:
            found[name] = None
    return found


def check_delta(delta: float) -> None:
    """Raises `UserError` unless 0 <= δ < 1."""
    if not 0 <= delta < 1:
        raise UserError(
            f"delta={delta} is not a probability in [0, 1); a usual choice is 1/(2N) for N examples"
        )


def prv_bounds(
    parts: Releases, delta: float, eps_error: float | None = None, grid_points: int = _GRID_POINTS
) -> tuple[float, float, float]:
    """(lower end, estimate, upper end) of ε as ``prv_accountant`` reports them, see `dpexp.privacy.prv`.

    ``eps_error`` is the half-width of the interval; by default 0.3% of ε, more where ``grid_points`` cannot
    hold it. The truncation follows Gopi et al., Remark 5.6, with our Rényi bound for the tails: the
    package's own evaluates orders up to 64 only, and does not return for some σ."""
    from dpexp.privacy import prv

    delta_error = delta / 1000
    total = sum(parts.values())
    rough = renyi_epsilon(parts, delta)
    tails = [renyi_epsilon({key: 1}, delta_error / (8 * total)) for key in parts]
    span = max(renyi_epsilon(parts, delta_error / 4), *tails) + 3
    finest = 2 * span * math.sqrt(total / 2 * math.log(12 / delta_error)) / grid_points
    error = max(eps_error or 0.003 * rough, finest)
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                lower, estimate, upper = prv.bounds(parts, delta, error, delta_error, span)
        except (
            RuntimeError,
            ValueError,
            AssertionError,
            IndexError,
            ArithmeticError,
        ):
            # the grid is too coarse, or δ too small for its arithmetic
            lower, estimate, upper = 0.0, math.inf, math.inf
        # A result above the rigorous Rényi bound betrays a grid that misses the rare, large losses of a
        # small q.
        if upper <= rough + 2 * error or error <= finest:
            return lower, estimate, upper
        error = max(error / 4, finest)


def _prv(parts: Releases, delta: float) -> float:
    if (bound := _bound(parts, delta)) is not None:
        return bound
    return prv_bounds(parts, delta)[2]


def _pld(parts: Releases, delta: float) -> float:
    if (bound := _bound(parts, delta)) is not None:
        return bound
    try:
        return float(loss_distribution(parts, delta).get_epsilon_for_delta(delta))
    except (ArithmeticError, IndexError, TypeError, ValueError):
        # δ or q next to the smallest of numbers
        return math.inf


def loss_distribution(parts: Releases, delta: float) -> PrivacyLossDistribution:
    """The pessimistic privacy loss distribution of the releases, on a grid that reaches as far as δ makes it matter."""
    # The rounding of one loss is felt relative to its standard deviation; the grid has to reach over all
    # that is likely.
    scale = _clt_mu(parts) / math.sqrt(sum(parts.values()))
    reach = max(math.log1p(q * math.expm1((1 + 20 * s) / (2 * s * s))) for q, s in parts)
    span = max(renyi_epsilon(parts, delta / 1e6), reach)
    interval = max(min(scale / 30, 1e-2), span / 4e5)
    total = lost_to_rounding(sum(parts.values()), interval)
    for (q, sigma), count in parts.items():
        one = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, value_discretization_interval=interval, sampling_prob=q
        )
        total = total.compose(self_composed(one, count))
    return total


def _gdp(parts: Releases, delta: float) -> float:
    return gaussian_epsilon(delta, _clt_mu(parts))


def _clt_mu(parts: Releases) -> float:
    """μ² = Σ_t q_t² (e^{1/σ_t²} - 1) (Bu et al. 2020, Theorem 5, step by step), and exactly Σ 1/σ² where q
    = 1."""
    squares = (
        count * (sigma**-2 if q == 1 else q * q * math.expm1(sigma**-2) if sigma**-2 < 700 else math.inf)
        for (q, sigma), count in parts.items()
    )
    return math.sqrt(sum(squares))


def _bound(parts: Releases, delta: float) -> float | None:
    """ε where no grid of losses is needed, or none would hold it; else None."""
    if (mu := unsampled(parts)) is not None:
        return gaussian_epsilon(delta, mu)
    if renyi_epsilon(parts, delta) == 0:
        return 0.0
    return math.inf if too_large(parts, delta) else None


def too_large(parts: Releases, delta: float) -> bool:
    """Whether ε is beyond what a grid of losses holds."""
    return renyi_epsilon(parts, delta) > LARGEST_EPSILON


def unsampled(parts: Releases) -> float | None:
    """μ of the single Gaussian that the releases are, or None where there is any sampling."""
    return _clt_mu(parts) if all(q == 1 for q, _ in parts) else None


def _by_library(event: DpEvent, delta: float, accountant: str) -> float:
    """Mechanisms other than Gaussians: as far as ``dp_accounting`` knows them."""
    if accountant not in ("rdp", "pld"):
        raise UserError(
            f"accountant={accountant} treats Poisson-sampled Gaussians only, and this event holds more; choose rdp or pld"
        )
    if without_noise(event):
        return math.inf
    # it reports every order that does not converge
    logging.getLogger("absl").setLevel(logging.ERROR)
    replaced = neighbouring(event) == REPLACE_ONE
    relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    one = (
        RdpAccountant(_ORDERS if replaced else None, relation)
        if accountant == "rdp"
        else PLDAccountant(relation)
    )
    try:
        return float(one.compose(event).get_epsilon(delta))
    except UnsupportedEventError as error:
        raise UserError(f"accountant={accountant} cannot treat this event: {error}") from None


ACCOUNTANTS: MappingProxyType[str, Callable[[Releases, float], float]] = MappingProxyType(
    {"rdp": renyi_epsilon, "gdp": _gdp, "prv": _prv, "pld": _pld}
)
