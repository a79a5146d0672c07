"""Running estimates of the acceptance rate: exact counts, fading, and correct error bars."""

import pytest
import torch

from specdec_kernels.analysis.estimates import AcceptanceEstimate, clustered_mean, wilson_interval

pytestmark = pytest.mark.analysis


def test_censored_counts_give_the_rate_of_the_toy_model():
    """alpha = 2/3, gamma = 3: 27 rounds in the proportions of the exact distribution."""
    counts = torch.tensor([0] * 9 + [1] * 6 + [2] * 4 + [3] * 8)
    estimate = AcceptanceEstimate.empty(3).update(counts)
    assert float(estimate.alpha) == 2 / 3
    assert estimate.by_position.tolist() == pytest.approx([2 / 3] * 3, abs=1e-15)
    assert estimate.visits.tolist() == [27, 18, 12]
    assert float(estimate.expected_tokens(3)) == pytest.approx(1 + float(counts.double().mean()))


def test_positions_that_were_not_drafted_are_not_visited():
    counts, drafted = torch.tensor([0, 1, 1, 3, 0]), torch.tensor([0, 2, 1, 3, 3])
    estimate = AcceptanceEstimate.empty(3).update(counts, drafted)
    assert estimate.accepted.tolist() == [3, 1, 1]
    assert estimate.visits.tolist() == [4, 2, 1]
    same = AcceptanceEstimate.empty(5).update(torch.tensor([0, 2, 1]), 2)
    assert same.visits.tolist() == [3, 2, 0, 0, 0]
    assert same.by_position.isnan().tolist() == [False, False, True, True, True]


def test_counts_fade_and_the_old_estimate_does_not_change():
    first = AcceptanceEstimate.empty(1, decay=0.5).update(torch.tensor([1, 1]))
    second = first.update(torch.tensor([0]))
    assert float(first.alpha) == 1
    assert float(second.alpha) == 1 / (1 + 1)
    assert float(second.effective_visits) == pytest.approx(2**2 / (2 * 0.25 + 1))
    for _ in range(60):
        second = second.update(torch.tensor([0]))
    assert float(second.alpha) < 1e-15
    # Weights decay^i tell as much as (1 + decay) / (1 - decay) equally weighted visits.
    assert float(second.effective_visits) == pytest.approx(3)


def test_observed_probabilities_count_where_they_are_numbers():
    rows = torch.tensor([[0.5, 1.0], [0.25, torch.nan]])
    estimate = AcceptanceEstimate.empty(2).observe(rows)
    assert float(estimate.alpha) == pytest.approx(1.75 / 3)
    assert estimate.by_position.tolist() == [0.375, 1.0]
    variance = torch.tensor([0.5, 1.0, 0.25]).double().var(correction=0)
    assert float(estimate.standard_error) == pytest.approx(float((variance / 3).sqrt()))


@pytest.mark.parametrize(
    ("hits", "n", "want"),
    [(0, 7, (0, 0.3543304)), (3, 7, (0.1582199, 0.7495416)), (61, 90, (0.5756684, 0.7653323))],
)
def test_the_interval_is_wilsons(hits, n, want):
    """The numbers are those of scipy.stats.binomtest(hits, n).proportion_ci(method="wilson")."""
    got = wilson_interval(torch.tensor(hits / n).double(), torch.tensor(n), z=1.9599640)
    assert [float(x) for x in got] == pytest.approx(want, abs=1e-7)


def simulated(runs, rounds, gamma, seed):
    """Estimates of many runs of rule `token` from verdicts and from probabilities; true alpha."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.2, 0.4, 0.2, 0.2]], dtype=torch.float64)
    shape = (runs, rounds, gamma)
    drafts = q.multinomial(runs * rounds * gamma, True, generator=generator).view(shape)
    ratio = (p / q).clamp(max=1)[drafts]
    accepted = torch.rand(shape, generator=generator) < ratio
    counts = accepted.long().cumprod(-1).sum(-1)
    visited = torch.arange(gamma) <= counts[..., None]
    ratio = ratio.where(visited, torch.nan)
    empty = AcceptanceEstimate.empty(gamma)
    both = [(empty.update(c), empty.observe(r)) for c, r in zip(counts, ratio, strict=True)]
    return both, float(torch.minimum(p, q).sum())


def test_error_bars_cover_the_rate_and_those_of_recorded_probabilities_are_smaller():
    both, alpha = simulated(runs=200, rounds=60, gamma=4, seed=3)
    verdicts, probabilities = zip(*both, strict=True)
    inside = sum(
        float(low) <= alpha <= float(high) for low, high in (s.interval() for s in verdicts)
    )
    assert 0.92 <= inside / len(both) <= 0.98
    for estimates in (verdicts, probabilities):
        z = torch.stack([(s.alpha - alpha) / s.standard_error for s in estimates])
        assert 0.85 < float(z.std()) < 1.15
        assert abs(float(z.mean())) < 0.3
    for a, b in both:
        assert b.standard_error < a.standard_error


def dependent(runs, clusters, seed):
    """[runs, clusters, n] values around 1 that share one part within each cluster."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(runs, clusters, 1, generator=generator)
    return 1 + shared + torch.randn(runs, clusters, 6, generator=generator)


def test_clustered_error_bars_cover_the_mean_of_dependent_values():
    values = dependent(runs=200, clusters=30, seed=7)
    means = [clustered_mean(list(run)) for run in values]
    z = torch.stack([(mean - 1) / error for mean, error in means])
    assert 0.9 < float(z.std()) < 1.15
    as_if_independent = [clustered_mean([run.flatten()]) for run in values]
    z = torch.stack([(mean - 1) / error for mean, error in as_if_independent])
    assert float(z.std()) > 1.5
