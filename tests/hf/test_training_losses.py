"""The losses of training: their values and gradients, and which of them is the acceptance rate."""

import pytest
import torch
from specdec_hf.lab.training.losses import mean_loss
from specdec_hf.lab.training.settings import LOSSES
from specdec_hf.lab.training.train import Recipe

from specdec_kernels.analysis import acceptance_rate

FORMULAS = {  # of P and the logarithm of Q
    "forward_kl": lambda p, log_q: -(p * log_q).sum(dim=-1),
    "reverse_kl": lambda p, log_q: (log_q.exp() * (log_q - p.log())).sum(dim=-1),
    "total_variation": lambda p, log_q: (p - log_q.exp()).abs().sum(dim=-1) / 2,
}
# P = (0.5, 0.3, 0.2) and Q = (0.4, 0.2, 0.4), by hand: value, and gradient for the logits of Q.
BY_HAND = {
    "forward_kl": (1.1242350, (-0.1, -0.1, 0.2)),
    "reverse_kl": (0.1069085, (-0.1320208, -0.1024747, 0.2344955)),
    "total_variation": (0.2, (-0.16, -0.08, 0.24)),
}


def test_every_loss_has_a_formula():
    assert set(LOSSES) == FORMULAS.keys() == BY_HAND.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_by_hand(name):
    target = torch.tensor([[0.5, 0.3, 0.2]])
    logits = (torch.tensor([[0.4, 0.2, 0.4]]).log() + 3).requires_grad_()
    value, gradient = BY_HAND[name]
    loss = mean_loss(name, logits, target, torch.tensor([True]))
    loss.backward()
    assert abs(loss.item() - value) < 1e-6
    torch.testing.assert_close(logits.grad, torch.tensor([gradient]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 0.02)])
def test_a_mean_loss_is_that_of_the_rows_that_count(name, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64)
    labels = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64).softmax(dim=-1)
    valid = torch.rand(3, 5, generator=generator) < 0.6
    exact, ours = logits.clone().requires_grad_(), logits.to(dtype).requires_grad_()
    want = FORMULAS[name](labels, exact.log_softmax(dim=-1))[valid].mean()
    if name == "forward_kl":
        torch.testing.assert_close(
            want, torch.nn.functional.cross_entropy(exact[valid], labels[valid])
        )
    got = mean_loss(name, ours, labels.to(dtype), valid)
    (2 * want).backward()
    (2 * got).backward()
    assert abs(got.item() - want.item()) < tolerance
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=tolerance, rtol=0)
    assert float(ours.grad[~valid].abs().max()) == 0


def test_the_total_variation_is_one_less_alpha():
    """So the other losses are not: theirs differs on the same rows."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 9, generator=generator, dtype=torch.float64)
    target = (3 * torch.randn(64, 9, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    alpha = float(acceptance_rate(target, logits.softmax(dim=-1)).mean())
    valid = torch.ones(64, dtype=torch.bool)
    losses = {name: float(mean_loss(name, logits, target, valid)) for name in LOSSES}
    assert abs(losses.pop("total_variation") - (1 - alpha)) < 1e-6
    assert all(abs(loss - (1 - alpha)) > 0.1 for loss in losses.values())


def test_of_drafters_that_cannot_be_the_target_the_total_variation_prefers_the_most_accepted():
    """The drafters are softmax(3z, 2z, z, 0), the likely tokens are the first and the last."""
    target = torch.tensor([0.5, 0.05, 0.05, 0.4])
    family = torch.linspace(-4, 4, 400)[:, None] * torch.tensor([3.0, 2.0, 1.0, 0.0])
    alpha = acceptance_rate(target.expand(400, -1), family.softmax(dim=-1))
    best = {
        name: int(
            torch.tensor(
                [mean_loss(name, row[None], target[None], torch.tensor([True])) for row in family]
            ).argmin()
        )
        for name in LOSSES
    }
    most = float(alpha.max())
    assert abs(float(alpha[best["total_variation"]]) - most) < 1e-6
    assert float(alpha[best["forward_kl"]]) < most - 0.05


def test_a_target_that_rounds_to_zero_has_a_finite_reverse_kl():
    target = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    logits = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = mean_loss("reverse_kl", logits, target, torch.tensor([True]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] > 0  # it drafts too much of what the target never says


def test_the_first_half_of_the_steps_has_the_forward_kl():
    recipe = Recipe(8, loss="total_variation")
    made = [recipe.loss_at(step, 8) for step in range(1, 9)]
    assert made == ["forward_kl"] * 4 + ["total_variation"] * 4
