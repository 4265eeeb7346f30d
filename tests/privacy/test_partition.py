"""Budgets of single examples: bins against all partitions, kept shares, a personalised median, what outputs told."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

from dpexp.account import AccountArguments, account, as_text
from dpexp.errors import UserError
from dpexp.privacy.output_specific import ORDERS, OutputSpecific
from dpexp.privacy.partition import exponential_mechanism, partition, read_budgets, sampling_mechanism
from dpexp.schemas import IndividualConfig


@pytest.mark.parametrize("value", [None, math.sqrt])
def test_bins_are_the_best_of_all_partitions(value):
    """Against every assignment of the distinct budgets to bins, whose members have the smallest budget in it."""
    budgets = np.array([0.5, 1.0, 1.0, 1.5, 4.0, 4.5, 4.5, 9.0, 0.5, 1.5])
    worth = value or (lambda x: x)
    found, groups = partition(budgets, 3, value)
    assert len(found) == 3
    assert all(budgets[groups == g].min() == e for g, e in enumerate(found))
    ours = sum(worth(found[g]) for g in groups)
    distinct = np.unique(budgets)
    best = 0.0
    for assigned in itertools.product(range(3), repeat=len(distinct)):
        where = np.asarray(assigned)[np.searchsorted(distinct, budgets)]
        smallest = {g: budgets[where == g].min() for g in set(where.tolist())}
        best = max(best, sum(worth(smallest[g]) for g in where.tolist()))
    assert ours == pytest.approx(best)
    everyone, one = partition(budgets, 1)
    assert (everyone, set(one.tolist())) == ([0.5], {0})
    assert partition(budgets, 99)[0] == distinct.tolist()


def test_who_is_kept_spends_the_budget():
    """Sampling an (t, δ)-DP mechanism with probability π gives ln(1 + π(e^t - 1))."""
    kept = sampling_mechanism([0.5, 1.0, 3.0, 700.0], 3.0)
    assert kept[2:] == [1.0, 1.0]
    for target, probability in zip([0.5, 1.0], kept, strict=False):
        assert math.log1p(probability * math.expm1(3.0)) == pytest.approx(target)
    assert sampling_mechanism([800.0], 900.0) == [pytest.approx(math.exp(-100))]
    with pytest.raises(UserError, match="positive"):
        sampling_mechanism([1.0], 0.0)


def test_the_personalised_median_protects_everyone_with_their_own_budget():
    """All values of all examples replaced by all others: the exact laws."""
    values, epsilons, answers = (
        np.array([0.0, 1, 1, 2, 3]),
        np.array([0.2, 0.5, 1.0, 2.0, 0.1]),
        np.arange(4.0),
    )
    law = exponential_mechanism(values, epsilons, answers)
    assert law.sum() == pytest.approx(1)
    assert answers[law.argmax()] == 1.0
    tight = 0.0
    for i, other in itertools.product(range(5), answers):
        replaced = values.copy()
        replaced[i] = other
        loss = np.abs(np.log(exponential_mechanism(replaced, epsilons, answers) / law)).max()
        assert loss <= epsilons[i] * (1 + 1e-12)
        tight = max(tight, loss / epsilons[i])
    assert tight > 0.5


def test_output_specific_epsilon_is_that_of_the_contributions():
    """K steps with each look, contributions rounded upwards, composed by dp_accounting alone."""
    analysis = OutputSpecific(4, 0.1)
    looks = ([1.0, 0.31, 0.0, math.nan], [0.5, 0.05, 0.0, 2.0])
    for ratios in looks:
        analysis.add(np.array(ratios), 0.02, 1.1, 50)
    found = analysis.epsilons(1e-5)
    for i, levels in enumerate(((1.0, 0.5), (0.4, 0.1), (), (1.0, 1.0))):
        one = RdpAccountant(ORDERS)
        for z in levels:
            one.compose(SelfComposedDpEvent(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1 / z)), 50))
        assert found[i] == pytest.approx(one.get_epsilon(1e-5) if levels else 0.0, rel=1e-6)
    assert found[1] < found[0] <= found[3]


def test_account_understands_groups():
    groups = IndividualConfig("scaling", [1.0, 3.0], [0.25, 0.75])
    result = account(AccountArguments(0.05, 100, 1e-5, individual=groups))
    spent = [group["epsilon"]["rdp"] for group in result["individual"]["groups"]]
    assert spent == pytest.approx([1.0, 3.0], rel=5e-3)
    assert result["epsilon"]["rdp"] == pytest.approx(max(spent))
    scales = [group["clip_scale"] for group in result["individual"]["groups"]]
    assert 0.25 * scales[0] + 0.75 * scales[1] == pytest.approx(1)
    assert "group 2           epsilon 3" in as_text(result)
    with pytest.raises(UserError, match="one for each group"):
        account(AccountArguments(0.05, 100, 1e-5, individual=IndividualConfig("scaling", [1.0, 3.0], [])))
    groups.groups = "file.txt"
    with pytest.raises(UserError, match=r"individual\.groups=file\.txt is of the examples of a run"):
        account(AccountArguments(0.05, 100, 1e-5, individual=groups))
    groups.groups = None
    with pytest.raises(UserError, match="decide the noise"):
        account(AccountArguments(0.05, 100, 1e-5, target_epsilon=1.0, individual=groups))


def test_a_file_of_budgets(tmp_path):
    (tmp_path / "b.txt").write_text("1\n2.5\n", encoding="utf-8-sig")
    assert read_budgets(tmp_path / "b.txt", 2).tolist() == [1.0, 2.5]
    (tmp_path / "b.txt").write_text("1\n2.5\nx\n")
    with pytest.raises(UserError, match="line 3: 'x' is not a positive number"):
        read_budgets(tmp_path / "b.txt", 3)
    with pytest.raises(UserError, match="has 3 lines for 4"):
        read_budgets(tmp_path / "b.txt", 4)
