"""The emitted law of every rule and every form of the draft: each cell, through the kernels."""

import functools

import pytest
import torch
from support.providers import (
    ALL_PROVIDERS,
    FAST_PROVIDERS,
    assert_close,
    assert_outputs_equal,
    needs_triton,
    provider,
    verify,
)
from support.toy_chain import (
    RATES,
    TOLERANCE,
    ToyChain,
    accepted_count_distribution,
    assert_joint_distribution,
    assert_target_distribution,
    chain_joint_distribution,
    lenient_masses,
    lossy_joint_distribution,
    rejection_mass,
    typical_masses,
)

from specdec_kernels import analysis, testing

FORMS = {
    "logits": dict(),
    "gamma1": dict(gamma=1),
    "gamma3-V2": dict(v=2, gamma=3),
    "bf16": dict(dtype=torch.bfloat16),
    "zeros": dict(v=4, holes=True),
    "equal": dict(same=True),
    "probs": dict(kind="probs"),
    "probs-zeros": dict(kind="probs", holes=True),
    "probs-shaped": dict(kind="probs", target_filters=dict(temperature=0.7, top_p=0.8)),
    "point-mass": dict(draft="none"),
    "point-mass-probs": dict(draft="none", kind="probs"),
    "filtered": dict(v=4, target_filters=dict(temperature=0.8, top_k=3, top_p=0.9)),
    "sampled": dict(v=4, draft="sampled", draft_filters=dict(temperature=1.8, top_k=3, min_p=0.1),
                    target_filters=dict(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05)),
    "sampled-greedy": dict(draft="sampled", draft_filters=dict(temperature=0.0)),
}  # fmt: skip
REDUCED = {
    "sparse": dict(draft="sparse"),
    "sparse-probs": dict(v=4, draft="sparse", kind="probs"),
    "sparse-filtered": dict(v=4, draft="sparse", target_filters=dict(temperature=0.7, top_k=3)),
    "mapped": dict(v=4, draft="mapped"),
    "mapped-probs": dict(draft="mapped", kind="probs"),
    "mapped-sampled": dict(
        v=4, draft="mapped-sampled", draft_filters=dict(temperature=0.6, top_k=2)
    ),
    "wide": dict(draft="wide"),
    "wide-probs": dict(draft="wide", kind="probs"),
    "wide-sampled": dict(draft="wide-sampled", draft_filters=dict(temperature=1.5, top_k=3)),
    "wide-filtered": dict(draft="wide", target_filters=dict(temperature=0.7, top_k=2)),
    "narrow": dict(draft="narrow"),
    "narrow-probs": dict(v=4, draft="narrow", kind="probs"),
    "narrow-sampled": dict(
        v=4, draft="narrow-sampled", draft_filters=dict(temperature=0.8, top_k=2)
    ),
}
LOSSLESS = [("block", f) for f in (FORMS | REDUCED)] + [("token", f) for f in REDUCED]


@functools.cache
def setting_of(rule, form):
    return ToyChain(**(FORMS | REDUCED)[form], rule=rule)


@pytest.mark.parametrize(("rule", "form"), LOSSLESS)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_the_emitted_law_is_the_targets(name, rule, form):
    setting = setting_of(rule, form)
    law = setting.realized(name)
    assert_target_distribution(law, setting)
    assert_close(
        "accepted", law.accepted, accepted_count_distribution(setting, rule), atol=TOLERANCE
    )


@pytest.mark.parametrize("form", FORMS | REDUCED)
def test_block_accepts_at_least_as_many_as_token(form):
    """Counted over the cells of the kernel, against the mass formula of `analysis`."""
    counts = {}
    for rule in ("block", "token"):
        setting = setting_of(rule, form)
        counts[rule] = setting.realized("cpp").mean_accepted
        want = analysis.mean_accepted(setting.draft_probs, setting.target_probs, rule)
        assert counts[rule] == pytest.approx(want, abs=TOLERANCE)
    assert counts["block"] >= counts["token"] - TOLERANCE
    if "gamma1" in form or "point-mass" in form:
        assert counts["block"] == pytest.approx(counts["token"], abs=TOLERANCE)


@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_block_of_one_draft_is_token(name):
    """Cell for cell: the same tokens for the same uniforms, not only the same law."""
    for form in ("gamma1", "zeros", "sparse", "wide", "mapped"):
        options = {**(FORMS | REDUCED)[form], "gamma": 1}
        rules = [ToyChain(**options, rule=rule).realized(name) for rule in ("block", "token")]
        assert_close("law", rules[0].joint, rules[1].joint, atol=1e-8)
        assert_close("accepted", rules[0].accepted, rules[1].accepted, atol=1e-8)


class Toy:
    """P = (1/3, 2/3) and Q = (2/3, 1/3) at every position."""

    def __init__(self):
        p, q = torch.tensor([[1 / 3, 2 / 3], [2 / 3, 1 / 3]], dtype=torch.float64)
        self.gamma = 2
        self.draft_probs = [q.expand((2,) * n) for n in (1, 2)]
        self.target_probs = [p.expand((2,) * n) for n in (1, 2, 3)]


@pytest.mark.parametrize(("rule", "mean"), [("token", 10 / 9), ("block", 11 / 9)])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_the_toy_model_of_the_paper(name, rule, mean):
    op, toy = provider("verify_chain", name), Toy()

    def run(drafts, uniforms):
        n = len(drafts)
        p, q = (
            x[0].log().float().expand(n, i, 2)
            for x, i in ((toy.target_probs, 3), (toy.draft_probs, 2))
        )
        return verify(op, p, drafts, q, rule=rule, uniforms=uniforms)[:2]

    law = testing.enumerate_distribution(run, toy.draft_probs, toy.target_probs, steps=26)
    assert_target_distribution(law, toy)
    assert law.mean_accepted == pytest.approx(mean, abs=TOLERANCE)
    exact = accepted_count_distribution(toy, rule)
    assert float((exact * torch.arange(3)).sum()) == pytest.approx(mean, abs=1e-12)


SMALL = {
    "block": dict(rule="block"),
    "block-sparse": dict(rule="block", draft="sparse", gamma=1),
    "block-wide": dict(rule="block", draft="wide", gamma=1),
    "block-mapped": dict(rule="block", draft="mapped", gamma=1),
    "token-sparse": dict(draft="sparse", gamma=1),
    "token-wide": dict(draft="wide", gamma=1),
    "token-mapped": dict(draft="mapped", gamma=1),
}


@needs_triton
@pytest.mark.parametrize("form", SMALL)
def test_the_emitted_law_is_the_targets_in_the_interpreter(form):
    setting = ToyChain(**{"v": 2, **SMALL[form]})
    assert_target_distribution(setting.realized("triton", steps=24), setting)


# Rules that change the law: to what they say, no further.


def test_the_formula_of_a_chain_gives_the_targets_law_for_rule_token():
    setting = ToyChain(gamma=3)
    want = testing.joint_distribution(setting.target_probs)
    assert_close(
        "law", lossy_joint_distribution(setting, lenient_masses, lenience=1.0), want, atol=1e-12
    )


LENIENT = {
    "logits": dict(),
    "V4-gamma1": dict(v=4, gamma=1),
    "probs-zeros": dict(kind="probs", holes=True),
    "point-mass": dict(draft="none", target_filters=dict(temperature=0.8, top_k=2)),
    "sparse": dict(draft="sparse"),
    "wide": dict(draft="wide"),
    "mapped-sampled": dict(v=4, draft="mapped-sampled", draft_filters=dict(top_k=2)),
}


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_lenience_is_of_rule_lenient_alone(name, rule, kind):
    n, g = (4 if name == "triton" else 64), torch.Generator().manual_seed(7)
    target, draft = torch.randn(n, 3, 5, generator=g), torch.randn(n, 2, 5, generator=g)
    if kind == "probs":
        target, draft = target.softmax(-1), draft.softmax(-1)
    tokens = torch.randint(0, 5, (n, 2), generator=g)
    call = functools.partial(
        verify, provider("verify_chain", name), target, tokens, draft, rule=rule, kind=kind,
        seeds=torch.arange(n),
    )  # fmt: skip
    assert_outputs_equal("verify_chain", call(lenience=0.125), call())


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.125])
@pytest.mark.parametrize("form", LENIENT)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_lenient_has_its_law(name, form, lenience):
    setting = ToyChain(**LENIENT[form], rule="lenient", lenience=lenience)
    law = setting.realized(name)
    assert_joint_distribution(
        law, lossy_joint_distribution(setting, lenient_masses, lenience=lenience)
    )
    first = law.joint.flatten(1).sum(-1)
    assert (first <= setting.target_probs[0] / lenience + TOLERANCE).all()
    if lenience == 1:
        assert_target_distribution(law, setting)
    elif form == "logits":
        assert (
            law.mean_accepted
            > analysis.mean_accepted(setting.draft_probs, setting.target_probs) + 0.01
        )


TYPICAL = {
    "medusa": dict(v=4),
    "strict": dict(v=4, epsilon=0.9, delta=1.1),
    "entropy": dict(v=4, epsilon=0.9, delta=0.6),
    "filtered": dict(v=4, epsilon=0.9, delta=0.8, target_filters=dict(temperature=1.3, top_k=2)),
    "probs": dict(v=4, epsilon=0.5, delta=0.7, kind="probs"),
    "all": dict(epsilon=0.0),
}


@pytest.mark.parametrize("form", TYPICAL)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_typical_has_its_law(name, form):
    setting = ToyChain(**TYPICAL[form], rule="typical")
    epsilon, delta = (setting.options.get(k, x) for k, x in (("epsilon", 0.09), ("delta", 0.3)))
    law = setting.realized(name)
    assert_joint_distribution(
        law, lossy_joint_distribution(setting, typical_masses, epsilon=epsilon, delta=delta)
    )
    assert form != "all" or float(law.accepted[-1]) == pytest.approx(1, abs=1e-9)
    assert form == "all" or 0 < law.mean_accepted < setting.gamma


@pytest.mark.parametrize("target", [dict(), dict(temperature=0.8, top_k=2), dict(temperature=0.0)])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_synthetic_accepts_at_its_rates_and_goes_on_with_the_target(name, target):
    setting = ToyChain(
        rule="synthetic", rates=RATES, target_filters=target, draft_filters=dict(temperature=1.0)
    )
    law = setting.realized(name)
    a, b = RATES.double().tolist()
    want = torch.tensor([1 - a, a * (1 - b), a * b], dtype=torch.float64)
    assert_close("accepted", law.accepted, want, atol=TOLERANCE)
    accept = [r * q for r, q in zip((a, b), setting.draft_probs, strict=True)]
    reject = [rejection_mass(x, p) for x, p in zip(accept, setting.target_probs, strict=False)]
    assert_joint_distribution(law, chain_joint_distribution(accept, reject, setting.target_probs))


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_rates_at_and_beyond_the_ends_are_certain(name):
    target, drafts = torch.zeros(1, 4, 3), torch.zeros(1, 3, dtype=torch.int64)
    top = 1 - 2.0**-53
    uniforms = torch.tensor([[top, top, 0.0, 0.5]], dtype=torch.float64)
    for rates, count, chances in (([1.0, 7.0, 0.0], 2, [1, 1, 0]), ([-1.0, 1.0, 1.0], 0, [0])):
        got = verify(provider("verify_chain", name), target, drafts, rule="synthetic",
                     rates=torch.tensor(rates), uniforms=uniforms)  # fmt: skip
        assert int(got[1]) == count
        assert got[4][0, : len(chances)].tolist() == chances


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_lenient_at_temperature_zero_takes_what_is_near_the_top(name, kind):
    """P(x) >= lenience * max P, P at temperature 1; what follows is the argmax."""
    p = torch.tensor([0.5, 0.26, 0.24, 0.0]).expand(4, 2, 4)
    drafts = torch.arange(4)[:, None]
    got = verify(provider("verify_chain", name), p if kind == "probs" else p.log(), drafts,
                 kind=kind, rule="lenient", lenience=0.5, temperature=0.0)  # fmt: skip
    assert got[0].tolist() == [[0, 0], [1, 0], [0, -1], [0, -1]]
    assert got[4][:, 0].tolist() == [1, 1, 0, 0]
    assert not got[3].any()


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_typical_is_strict(name):
    """A certain token has P = 1 and H = 0: it is not above a bound of 1."""
    target = torch.tensor([0.0, -torch.inf, -torch.inf]).expand(1, 2, 3)
    for delta, count in ((1.0, 0), (0.999, 1)):
        got = verify(provider("verify_chain", name), target, torch.tensor([[0]]), rule="typical",
                     epsilon=1.0, delta=delta)  # fmt: skip
        assert (int(got[1]), got[0][0, 0], got[4].tolist()) == (count, 0, [[count]])


def synthetic_parts(p, q, rate):
    return rate * q, rejection_mass(rate * q, p)


LOSSY = {  # options, and the parts of the law
    "lenient": (dict(lenience=0.5), functools.partial(lenient_masses, lenience=0.5)),
    "typical": (dict(epsilon=0.9, delta=0.8),
                functools.partial(typical_masses, epsilon=0.9, delta=0.8)),
    "synthetic": (dict(rates=RATES[1:]), functools.partial(synthetic_parts, rate=float(RATES[1]))),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("rule", LOSSY)
def test_lossy_rules_have_their_law_in_the_interpreter(rule):
    options, parts = LOSSY[rule]
    setting = ToyChain(v=2, gamma=1, rule=rule, **options)
    law = setting.realized("triton", steps=24)
    assert_joint_distribution(law, lossy_joint_distribution(setting, parts))
    assert 0 < law.mean_accepted < 1


@pytest.mark.parametrize("rule", ["token", "block", "lenient", "typical", "synthetic"])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_acceptance_is_the_measured_chance(name, rule):
    """The optional output is where the coin turns: tried just below and just above it."""
    setting = ToyChain(v=4, gamma=2, rule=rule, lenience=0.7 if rule == "lenient" else 1.0,
                      rates=RATES if rule == "synthetic" else None)  # fmt: skip
    op = provider("verify_chain", name)
    drafts = testing.joint_distribution(setting.draft_probs).nonzero()
    args = setting.arguments(drafts, "cpp")
    n = len(drafts)
    for i in range(2):
        # Walks reach draft 1 after draft 0, blocks draft 0 after draft 1.
        others = 1 - 2.0**-53 if rule == "block" else 0.0
        uniforms = torch.full((n, 3), others, dtype=torch.float64)
        chances = verify(op, tokens=drafts, uniforms=uniforms, **args)[4][:, i].double()
        looked = ~chances.isnan()
        assert looked.any()
        for shift in (-1e-5, 1e-5):
            inside = looked & (chances + shift > 0) & (chances + shift < 1)
            uniforms[:, i] = torch.where(inside, chances + shift, 0.5)
            count = verify(op, tokens=drafts, uniforms=uniforms, **args)[1][inside]
            stands = count == 2 if rule != "block" and i else count > i
            assert (stands == (shift < 0)).all()
