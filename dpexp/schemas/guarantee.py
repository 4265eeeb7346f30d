"""The guarantee: what is clipped and how, how much noise there is and when, whom it protects."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ClipConfig:
    """Which parameters share a norm, how thresholds move, how a norm becomes a factor, where the noise goes."""

    name: str = ""
    # false: neither clipped nor noised
    private: bool = True
    # parameters that share one norm: all, those of a layer, of a block, of a device
    groups: str = "flat"
    # K of groups=device
    devices: int = 0
    # C, the equivalent global threshold: the sensitivity of all groups together
    clip_norm: float = 1.0
    # first C_k of an adaptive rule; null = C/sqrt(K)
    init_threshold: float | None = None
    # thresholds follow the norms, by noisy counts
    adaptive: bool = False
    # p, the share of the norms that should lie below their threshold
    target_quantile: float = 0.5
    # eta, how fast thresholds follow
    quantile_lr: float = 0.3
    # how a threshold moves: C·exp(-eta·error) or C - eta·error
    quantile_update: str = "geometric"
    # what adaptive thresholds follow: a quantile of the norms, or their mean
    follows: str = "quantile"
    # alpha: C_k over the mean norm
    norm_factor: float = 1.0
    # beta: a norm counts at most so many C_k in the mean
    norm_bound: float = 2.0
    # r, the share of the privacy budget that the quantiles cost
    quantile_budget: float = 0.0
    # adaptive thresholds are rescaled so that all together stay C
    rescale: bool = True
    # of the noise to the groups
    allocation: str = "global"
    # how a norm becomes a factor; normalized and automatic scale small gradients up too
    rule: str = "abadi"
    # the smallest that an adaptive threshold becomes
    threshold_floor: float = 1e-6
    # what is clipped: gradients by their norms, or as dpexp.clipping.methods.whole and .microbatches say
    method: str = "norm"
    # adaclip: of mean and variance; scaled: of v
    memory: list[float] = field(default_factory=lambda: [0.99, 0.9])
    # adaclip: what gradients are clipped to in the first step
    init_norm: float = 1.0
    # adaclip: of a coordinate
    variance_range: list[float] = field(default_factory=lambda: [1e-12, 10.0])
    # ellipsoid, scaled: of a coordinate, relative to the root mean square of all
    scale_floor: float = 0.01
    # ellipsoid, embedding: so many of the dev set
    public_examples: int = 64
    # embedding: dimensions of the public subspace
    basis: int = 16
    # embedding: the threshold outside of it
    residual_norm: float = 0.2
    # examples of one microbatch
    microbatch: float = 0.0
    # jl: r, random directions that a norm is estimated from
    projections: int = 30
    # fedavg: of a user's own training, over the rows that a step takes
    local_epochs: int = 1
    # fedavg: rows in a batch of it; 0 = all of them
    local_batch: int = 0
    # fedavg: the learning rate of a user's own training
    local_lr: float = 0.1


@dataclass
class PrivacyConfig:
    """The guarantee: exactly one of epsilon and noise_multiplier is given for a private run."""

    # the target; the noise follows from it
    epsilon: float | None = None
    # sigma, in the place of epsilon
    noise_multiplier: float | None = None
    # a number, or the name of a rule
    delta: str = "n_pow_-1.1"
    # poisson, or fixed: batches of one size; shuffle is what no accountant covers
    sampling: str = "poisson"
    # b, over so many steps noise is correlated, or auto; 1 = each step's noise is its own
    bands: str = "1"
    # strict: the record holds nothing that follows from private rows without noise
    release: str = "normal"
    # for tests: the guarantee holds only while this number is secret
    noise_seed: int | None = None
    # do not delete the secret key when the run is finished
    keep_key: bool = False
    # noise by whole numbers alone: exact, some hundred times slower
    secure: bool = False


@dataclass
class AccountantConfig:
    """Which accountant decides; all of them are printed."""

    name: str = "rdp"
    # let gdp, an approximation that may under-estimate, decide the noise
    allow_clt: bool = False


@dataclass
class ScheduleConfig:
    """How the noise moves over the epochs (`dpexp.privacy.schedules`)."""

    name: str = "constant"
    # k: how fast the noise falls (docs/privacy.md, Noise over time)
    decay_rate: float | None = None
    # epochs after which the noise takes its next step, or a polynomial ends
    period: float | None = None
    # sigma_end / sigma_0
    end_ratio: float | None = None
    # how often the noise changes within an epoch
    updates_per_epoch: int = 1
    # kappa = M/mu, of a loss that is M-smooth and mu-PL
    condition: float | None = None
    # dEER/dsigma² in equal parts of the run, measured on public data
    influences: list[float] | None = None
    # of the noise in equal parts of the run, relative to the first
    factors: list[float] | None = None
    # of a noise that follows the training: its first level, relative to constant noise
    start: float | None = None
    # validation: the rise below which the noise falls
    threshold: float | None = None
    # scores or gradients that are averaged
    window: int | None = None
    # validation: steps between two scores
    every: int | None = None


@dataclass
class UnitConfig:
    """Whom the guarantee protects: one example, or one user with all examples of theirs (`dpexp.tasks.users`)."""

    # whom the guarantee protects
    name: str = "example"
    # who gave each training row: exactly one of a column of data.train, a file with a name in the line of each row, and a size
    # (made-up users of so many rows, for experiments on data without users)
    column: str | None = None
    file: str | None = None
    # rows of each made-up user
    size: int = 0
    # N, public; follows from size
    num_users: int | None = None
    # M, the most rows of a user that a step takes
    rows: int = 1


@dataclass
class IndividualConfig:
    """Groups of examples with an epsilon of their own (`dpexp.privacy.individual`)."""

    name: str = "none"
    # of each group; they decide the noise
    epsilons: list[float] = field(default_factory=list)
    # of the examples, drawn at random with the seed
    shares: list[float] = field(default_factory=list)
    # or a file that has in the line of each training example the number of its group, from 1 on; public
    groups: str | None = None
    # or a file that has in the line of each training example an epsilon of its own, which are put into bins; public
    budgets: str | None = None
    # of budgets: how many
    bins: int = 3
    # what the bins are chosen for: privacy_aware | utility
    partition: str = "privacy_aware"


@dataclass
class SearchConfig:
    """Step sizes found within the budget (`dpexp.training.searches.base`); `optim.lr` is the largest one at first."""

    name: str = "none"
    # noisymax: laplace | exponential; noisybtls: above_threshold
    mechanism: str = "laplace"
    # s, of each step's budget
    share: float = 0.0
    # C_obj, of an example's loss
    objective_clip: float = 1.0
    # γ, by which a budget rises after a failure
    raise_by: float = 0.1
    # noisymax: step sizes above 0
    candidates: int = 10
    # noisymax: successes between two changes of the largest step size
    window: int = 10
    # noisymax: how far it reaches beyond the best of them
    growth: float = 0.1
    # noisybtls: step sizes at most
    tries: int = 10
    # noisybtls: β, from one step size to the next
    backtrack: float = 0.5
    # noisybtls: α, the share of the slope that a step must fall by
    armijo: float = 1e-4
    # noisybtls: ψ
    angle_memory: float = 0.9
    # noisybtls: φ_max
    angle_high: float = 1.1
    # noisybtls: φ_min
    angle_low: float = 0.9
    # noisybtls: ζ, of both thresholds
    shrink: float = 0.01
