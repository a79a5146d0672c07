"""vLLM's `RejectionSampler` around a sampler that is not vLLM's own class."""

import pytest
import torch

pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")

from specdec_vllm import vllm_interface
from specdec_vllm.step_v1 import Step
from support.vllm_batches import V, certain, metadata, sampling
from vllm.v1.sample import rejection_sampler as stock
from vllm.v1.sample.sampler import Sampler

pytestmark = pytest.mark.usefixtures("kernels")


def test_a_sampler_of_its_own_draws_the_bonus_tokens(plugin):
    """A class derived from vLLM's, which may do anything with the row of the bonus token."""

    class Own(Sampler):
        def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
            return torch.full((len(logits),), 31), None

    plugin()
    given = metadata([[1, 2], [9]]), None, certain([1, 2, 4, 5, 6]), sampling(2)
    out = stock.RejectionSampler(Own())(*given).sampled_token_ids
    assert out.tolist() == [[1, 2, 31], [5, -1, -1]]
    assert stock.RejectionSampler(Sampler())(*given).sampled_token_ids[0, 2] == 4


@pytest.mark.parametrize("top_p", [None, 0.9])
@pytest.mark.parametrize("min_p", [0.5, 0.0])
def test_min_p_holds_for_a_sampler_of_its_own(plugin, min_p, top_p):
    """For drafted positions, bonus tokens and steps without drafts; min-p 0 is the control."""

    class Own(Sampler):
        """Draws without the plug-in."""

        def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
            return logits.softmax(-1).multinomial(1)[:, 0], None

    plugin()
    number = 400
    step = Step("token", torch.arange(number), torch.zeros(number).long(), torch.ones(number))
    step = step._replace(min_p=min_p * step.min_p)
    given = sampling(number, temperature=1.0, top_p=top_p)
    logits = torch.zeros(2 * number, V)
    logits[:, 3] = 3.0  # 20 times as probable as each of the others
    logits[:, 4] = 2.5
    for cls in (Own, type("Derived", (Sampler,), {})):
        sampler = cls()
        assert vllm_interface.serves_min_p(sampler)
        sampler.specdec_step = step
        rejection = stock.RejectionSampler(sampler)
        drafted = [[3 + 4 * (i % 2)] for i in range(number)]  # 7 is below the threshold
        out = rejection(metadata(drafted), None, logits, given).sampled_token_ids
        sampler.specdec_step = step
        plain = sampler(logits[:number], given).sampled_token_ids
        assert (out[:, 1] >= 0).any()
        for tokens in (out[:, 0], out[:, 1], plain):
            low = [t for t in tokens.flatten().tolist() if t not in (-1, 3, 4)]
            assert not low if min_p else low


def test_min_p_of_another_sampler_comes_after_the_processors_of_vllm(plugin):
    """A token that they forbid is not the largest any more, so others are above the threshold."""

    class Own(Sampler):
        pass

    plugin()
    sampler = Own()
    number = 200
    logits = torch.full((2 * number, V), -9.0)
    logits[:, 3], logits[:, 4], logits[:, 5] = 9.0, 1.0, 0.8
    forbidden = torch.zeros(number, V, dtype=torch.bool)
    forbidden[:, 3] = True
    sampler.specdec_step = Step(
        "token", torch.arange(number), torch.zeros(number).long(), torch.full((number,), 0.5)
    )
    given = sampling(number, temperature=1.0, allowed_token_ids_mask=forbidden)
    rejection = stock.RejectionSampler(sampler)
    out = rejection(metadata([[4]] * number), None, logits, given).sampled_token_ids
    assert {*out[:, 0].tolist()} == {4, 5}
    assert {*out[:, 1].tolist()} == {-1, 4, 5}


def test_the_bonus_noise_of_another_sampler_is_not_that_of_a_draft(plugin):
    seen = []

    class Own(Sampler):
        def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
            seen.append(self.specdec_step.positions.tolist())
            return torch.zeros(len(logits)).long(), None

    plugin()
    sampler = Own()
    sampler.specdec_step = Step("match", torch.arange(2), torch.tensor([10, 20]), None)
    logits = certain([1, 2, 4, 5, 6])
    stock.RejectionSampler(sampler)(metadata([[1, 2], [9]]), None, logits, sampling(2))
    assert seen == [[12, 21]]


@pytest.mark.parametrize("name", ["forward", "apply_logits_processors"])
def test_a_sampler_that_avoids_the_place_of_min_p_is_known(plugin, name):
    plugin()
    other = type("Other", (Sampler,), {name: lambda *_: None})
    assert vllm_interface.serves_min_p(Sampler())
    assert not vllm_interface.serves_min_p(other())
