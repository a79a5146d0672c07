"""vLLM's `RejectionSampler` with the plug-in, called as its runner and as its own tests call it.

The cases are those of vLLM's tests/v1/sample/test_rejection_sampler.py, which its wheel does not
hold; test_suite_of_vllm.py runs that file itself where there is one.
"""

from dataclasses import replace
from itertools import chain
from unittest.mock import Mock

import pytest
import torch
from compat.sglang_loops import expected
from proofs import chi_square

vllm = pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")

from specdec_vllm import RULES, vllm_interface  # noqa: E402
from specdec_vllm.step_v1 import Step  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.v1.sample import rejection_sampler as stock  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels")

V = 40


class Own(Sampler):
    """A sampler of another class than vLLM's, which draws without the plug-in."""

    def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
        return logits.softmax(-1).multinomial(1)[:, 0], None


def sampling(number, *, temperature=0.0, top_k=None, top_p=None, generators=None, **given):
    """The sampling parameters of a batch, scalars or lists."""

    def vector(value, dtype=torch.float32):
        return None if value is None else torch.tensor(value, dtype=dtype).expand(number).clone()

    temperatures = vector(temperature)
    greedy = temperatures == 0
    defaults = dict(
        temperature=None if greedy.all() else temperatures, all_greedy=bool(greedy.all()),
        all_random=not bool(greedy.any()), top_p=vector(top_p), top_k=vector(top_k, torch.int32),
        generators=generators or {}, max_num_logprobs=None, no_penalties=True,
        prompt_token_ids=None, frequency_penalties=torch.zeros(number),
        presence_penalties=torch.zeros(number), repetition_penalties=torch.ones(number),
        output_token_ids=[[] for _ in range(number)], spec_token_ids=[[] for _ in range(number)],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    return SamplingMetadata(**defaults | given)


def metadata(drafts):
    """That of a batch, with rows and indices as the runner lays them out."""
    made = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    ends = made.cu_num_sampled_tokens.long()
    made.bonus_logits_indices = (ends - 1).int()
    rows = torch.arange(int(ends[-1]), dtype=torch.int32)
    made.target_logits_indices = rows[~torch.isin(rows, made.bonus_logits_indices)]
    made.logits_indices = rows
    return made


def certain(tokens):
    """Logits that leave no doubt about the tokens."""
    logits = torch.full((len(tokens), V), -50.0)
    logits[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)] = 50.0
    return logits


def verified(
    drafts, logits, sampling_metadata, draft=None, mode="raw_logprobs", cls=Sampler, form="probs"
):
    """Drafts with probabilities, or in the form "logits" as in a step that the runner knows."""
    sampler = cls(logprobs_mode=mode)
    if form == "logits":
        seeds = torch.arange(len(drafts))
        sampler.specdec_step = Step("token", seeds, 0 * seeds, None, draft_logits=True)
    return stock.RejectionSampler(sampler)(metadata(drafts), draft, logits, sampling_metadata)


CASES = [  # drafts, the target's tokens, emitted
    ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]), ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]]),
    ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4, -1]]), ([[]], [[5]], [[5]]),
    ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7, -1], [4, 8, -1, -1]]),
]  # fmt: skip


@pytest.mark.parametrize("rule", [None, "block", "match"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("drafts", "targets", "emitted"), CASES)
def test_tokens_without_doubt_are_accepted_until_the_first_other(
    plugin, drafts, targets, emitted, temperature, rule
):
    plugin(rule=rule)
    number = len(drafts)
    given = sampling(number, temperature=temperature)
    logits = certain([*chain.from_iterable(targets)])
    assert verified(drafts, logits, given).sampled_token_ids.tolist() == emitted


# Temperature, top-k and top-p of four requests with different numbers of drafts.
PARAMETERS = dict(temperature=[0.6, 1.0, 1.5, 0.9], top_k=[5, 40, 8, 3], top_p=[1.0, 0.8, 0.9, 0.7])
COPIES = 3000


def p_value(form, logprobs=None, **how):
    """Of the first tokens of many equal batches in one; a token outside of the support gives 0."""
    torch.manual_seed(0)  # the seeds of the requests come from it
    generator = torch.Generator().manual_seed(2)
    lengths = [2, 1, 3, 1]
    rows = [2 * torch.randn(n + 1, V, generator=generator) for n in lengths]
    logits = [torch.randn(n, V, generator=generator) for n in lengths]
    at = PARAMETERS["temperature"] if form == "logits" else [1.0] * 4
    q = [(row / temperature).softmax(-1) for row, temperature in zip(logits, at, strict=True)]
    draft = torch.cat(logits if form == "logits" else q).repeat(COPIES, 1) if form else None
    drafts = [
        torch.multinomial(row, 1, generator=generator)[:, 0].tolist()
        for _ in range(COPIES) for row in q
    ]  # fmt: skip
    given = {name: values * COPIES for name, values in PARAMETERS.items()}
    given = sampling(4 * COPIES, **given, max_num_logprobs=logprobs)
    out = verified(drafts, torch.cat(rows).repeat(COPIES, 1), given, draft, form=form, **how)
    found = []
    for i, row in enumerate(rows):
        wanted = expected(row[0], *(values[i] for values in PARAMETERS.values()))
        first = out.sampled_token_ids.view(COPIES, 4, -1)[:, i, 0].clamp_min(0).long()
        found.append(0.0 if (wanted[first] == 0).any() else chi_square(first, wanted))
    return min(found)


@pytest.mark.parametrize("form", ["probs", "logits", None])
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_every_request_follows_its_own_temperature_and_filters(plugin, rule, form):
    plugin(rule=rule)
    assert p_value(form) > 1e-4


def test_logits_of_drafts_are_those_of_the_temperature_wherever_they_are_read(plugin):
    """Beside processed logits, and as probabilities for a sampler of another class."""
    plugin()
    assert p_value("logits", logprobs=0, mode="processed_logprobs") > 1e-4
    assert p_value("logits", cls=type("Other", (Own,), {})) > 1e-4


def test_drafts_with_logits_are_read_in_the_dtype_of_the_target_and_where_they_lie(plugin, handed):
    """In float32, as the target's, after processors of vLLM that write all of its rows."""
    plugin()
    rows, draft = torch.randn(8, V, dtype=torch.bfloat16).split([5, 3])
    for dtype, bad in (torch.bfloat16, {}), (torch.float32, {0: [[1, 2]]}):
        given = sampling(2, temperature=0.7, bad_words_token_ids=bad, spec_token_ids=[[3, 1], [6]])
        with handed:
            verified([[3, 1], [6]], rows, given, draft, form="logits")
        assert handed.dtypes == (dtype, dtype)
        assert bool(handed.rows) == bool(bad)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_that_the_processors_of_vllm_forbid_do_not_come(plugin, rule):
    plugin(rule=rule)
    allowed = torch.ones(2, V, dtype=torch.bool)
    allowed[0, [3, 4]] = allowed[1, [5, 6]] = False  # True masks
    given = sampling(
        2, temperature=1.0, allowed_token_ids_mask=allowed,
        bad_words_token_ids={1: [[5]]}, output_token_ids=[[], []], spec_token_ids=[[3, 1], [6, 6]],
    )  # fmt: skip
    for _ in range(5):
        out = verified([[3, 1], [6, 6]], torch.zeros(6, V), given).sampled_token_ids
        assert set(out[0].tolist()) <= {3, 4, -1}
        assert set(out[1].tolist()) <= {6, -1}


def test_penalties_of_sampled_requests_are_those_of_vllm(plugin):
    plugin()
    # 8 is drafted and the best; its penalty makes the lowest token not drafted yet the best.
    logits = torch.where(torch.arange(V) == 8, 1.0, -0.5 * torch.arange(V)).repeat(3, 1)
    given = sampling(
        1, temperature=1e-3, no_penalties=False, frequency_penalties=torch.tensor([2.0]),
        prompt_token_ids=torch.tensor([[0]]), output_token_ids=[[2]], spec_token_ids=[[8, 0]],
    )  # fmt: skip
    assert verified([[8, 0]], logits, given).sampled_token_ids.tolist() == [[8, 0, 1]]


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
)
def test_logprobs_are_served_in_every_mode(plugin, mode):
    plugin()
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(5))
    given = sampling(1, temperature=0.5, top_k=6, max_num_logprobs=2)
    given = replace(given, generators={0: torch.Generator().manual_seed(0)})
    out = verified([[int(logits[0].argmax()), 2]], logits, given, mode=mode)
    tokens = out.sampled_token_ids[0]
    expected = logits.clone()
    if mode.startswith("processed"):
        expected /= 0.5
        expected[expected < expected.topk(6).values[:, -1:]] = -torch.inf
    if mode.endswith("logprobs"):
        expected = expected.log_softmax(-1)
    emitted = tokens[tokens >= 0].long()
    got = out.logprobs_tensors.logprobs[: len(emitted), 0]
    torch.testing.assert_close(got, expected[torch.arange(len(emitted)), emitted])
    top = out.logprobs_tensors.logprobs[: len(emitted), 1:]
    torch.testing.assert_close(top, expected.topk(2).values[: len(emitted)])


def test_acceptance_rates_of_a_synthetic_benchmark_hold(plugin):
    plugin(rule="match")
    config = Mock(
        rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.8, 0.4], spec=None
    )
    sampler = stock.RejectionSampler(Sampler(), config, torch.device("cpu"))
    given = sampling(COPIES, temperature=1.0)
    logits = torch.zeros(3 * COPIES, V)
    out = sampler(metadata([[1, 2]] * COPIES), None, logits, given).sampled_token_ids
    # Not by ids: the token after a rejected draft is drawn from the target, which may repeat it.
    accepted = (out >= 0).sum(1) - 1
    shares = torch.tensor([0.2, 0.4, 0.4], dtype=torch.float64)
    assert chi_square(accepted, shares) > 1e-4
    assert (out[accepted >= 1, 0] == 1).all()
    assert (out[accepted == 2, 1] == 2).all()


@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_configuration_of_vllm_chooses_the_rule_unless_the_environment_does(plugin, method):
    plugin()
    config = Mock(rejection_sample_method=method)
    rule = {"standard": "token", "block": "block"}[method]
    assert stock.RejectionSampler(Sampler(), config).specdec_rule == rule
    vllm_interface.restore()
    plugin(rule="match")
    assert stock.RejectionSampler(Sampler(), config).specdec_rule == "match"


def test_min_p_is_served_and_a_bias_on_logits_refused(plugin):
    plugin()
    config = object()
    vllm.SamplingParams(min_p=0.1)._validate_spec_decode(config)
    with pytest.raises(VLLMValidationError, match="not yet supported"):
        vllm.SamplingParams(logit_bias={1: 2.0})._validate_spec_decode(config)
    vllm_interface.restore()
    with pytest.raises(VLLMValidationError, match="not yet supported"):
        vllm.SamplingParams(min_p=0.1)._validate_spec_decode(config)


def test_a_function_with_other_arguments_is_not_replaced(monkeypatch):
    assert vllm_interface.unsupported() is None
    monkeypatch.setattr(stock.RejectionSampler, "forward", lambda self, batch: None)
    reason = vllm_interface.unsupported()
    assert "must take self metadata draft_probs logits sampling_metadata, got self batch" in reason


@pytest.mark.parametrize("top_p", [None, 0.9])
@pytest.mark.parametrize("min_p", [0.5, 0.0])
def test_min_p_holds_for_a_sampler_of_its_own(plugin, min_p, top_p):
    """For drafted positions, bonus tokens and steps without drafts; min-p 0 is the control."""
    plugin()
    number = 400
    seeds = torch.arange(number)
    step = Step("token", seeds, 0 * seeds, torch.full((number,), min_p))
    given = sampling(number, temperature=1.0, top_p=top_p)
    logits = torch.zeros(2 * number, V)
    logits[:, 3] = 3.0  # 20 times as probable as each of the others
    logits[:, 4] = 2.5
    for cls in (Own, type("Derived", (Sampler,), {})):
        sampler = cls()
        assert vllm_interface.serves_min_p(sampler)
        sampler.specdec_step = step
        drafted = [[3 + 4 * (i % 2)] for i in range(number)]  # 7 is below the threshold
        rejection = stock.RejectionSampler(sampler)
        out = rejection(metadata(drafted), None, logits, given).sampled_token_ids
        sampler.specdec_step = step
        plain = sampler(logits[:number], given).sampled_token_ids
        assert (out[:, 1] >= 0).any()
        for tokens in (out[:, 0], out[:, 1], plain):
            low = [t for t in tokens.flatten().tolist() if t not in (-1, 3, 4)]
            assert not low if min_p else low


@pytest.mark.parametrize("name", ["forward", "apply_logits_processors"])
def test_a_sampler_that_avoids_the_place_of_min_p_is_known(plugin, name):
    plugin()
    other = type("Other", (Sampler,), {name: lambda *_: None})
    assert vllm_interface.serves_min_p(Sampler())
    assert not vllm_interface.serves_min_p(other())
