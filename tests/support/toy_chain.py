"""Small models of a target and a draft, whose verifiers are enumerated cell by cell."""

import pytest
import torch
from support.providers import assert_close, provider, sample, verify

from specdec_kernels import testing

TOLERANCE = 1e-6
RATES = torch.tensor([0.75, 0.3])  # of rule synthetic
BOUNDARY_PROVIDER = "cpp"  # whose edges the slower providers are tried at


def logit_tables(generator, v, rows, scale=1.5, holes=False):
    """`rows` conditionals on the prefix as float32 logits: [v] * (i + 1), some -inf if asked."""
    out = []
    for i in range(rows):
        t = scale * torch.randn((v,) * (i + 1), generator=generator)
        if holes:
            dead = torch.rand(t.shape, generator=generator) < 0.35
            dead[..., torch.randint(0, v, (1,), generator=generator)] = False
            t = t.masked_fill(dead, -torch.inf)
        out.append(t)
    return out


def distributions(logit_tables, **filters):
    """The exact law of each row of each table."""
    return [
        torch.stack(
            [testing.filtered_distribution(r, **filters) for r in t.reshape(-1, t.shape[-1])]
        ).view(t.shape)
        for t in logit_tables
    ]


def rows_after(conditionals, drafts):
    """[N, rows, V]: the row that follows each prefix of each draft tuple."""
    return torch.stack([t[tuple(drafts[:, :i].T)] if i else t.expand(len(drafts), -1)
                        for i, t in enumerate(conditionals)], 1)  # fmt: skip


def without(tables, dead):
    """The tables with some ids impossible: a slice, or a function of a table."""
    out = []
    for table in tables:
        t = table.clone()
        t[dead(t) if callable(dead) else (..., dead)] = -torch.inf
        out.append(t)
    return out


class ToyChain:
    """Tables, and the arguments an implementation of `verify_chain` gets for a draft tuple.

    All tables are over one vocabulary; what the target or the draft lacks has no probability there.
    draft: as in `testing.chain_case`, for tables of these laws. options: more keyword arguments.
    """

    def __init__(self, v=3, gamma=2, *, seed=0, draft="full", kind="logits", dtype=torch.float32,
                 holes=False, same=False, rule="token", target_filters=None, draft_filters=None,
                 **options):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.v, self.gamma, self.kind, self.rule, self.options = v, gamma, kind, rule, options
        self.form, _, self.left = draft.partition("-")
        self.draft = draft
        self.target_filters = target_filters or {}
        self.draft_filters = draft_filters or {}
        size = v + 1 if self.form == "wide" else v
        p = [t.to(dtype) for t in logit_tables(generator, size, gamma + 1, holes=holes)]
        q = p[:gamma] if same else logit_tables(generator, size, gamma, holes=holes)
        q = [t.to(dtype) for t in q]
        p = without(p, slice(v, None))
        # Columns of a mapped draft: every id but 0, in falling order.
        self.column_ids = torch.arange(v - 1, 0, -1)
        if self.form == "narrow":
            q = without(q, slice(v - 1, None))
        elif self.form == "mapped":
            q = without(q, 0)
        elif self.form == "sparse":
            q = without(q, lambda t: t < t.topk(2, -1).values[..., 1:])
        self.target_probs = distributions(p, **self.target_filters)
        temperature = {k: x for k, x in self.target_filters.items() if k == "temperature"}
        self.draft_probs = distributions(q, **(self.draft_filters or temperature))
        if kind == "probs":
            p, q = ([t.float().softmax(-1) for t in x] for x in (p, q))
            self.target_probs = distributions([t.double().log() for t in p], **self.target_filters)
            self.draft_probs = [t.double() for t in q]
        if draft == "none":
            self.draft_probs = [torch.nn.functional.one_hot(t.argmax(-1), v).double() for t in q]
        self.p, self.q = p, q

    def arguments(self, drafts, provider_name):
        """Keyword arguments of `providers.verify` for these draft tuples."""
        target = rows_after(self.p, drafts)[..., : self.v]
        sampled = None
        given = self._draft(drafts, target)
        if "sampled" in (self.form, self.left):
            filters = {"temperature": 1.0, **self.draft_filters}
            rows = given["draft"]
            out = sample(provider("sample", provider_name), rows.flatten(0, 1), **filters)
            shape = rows.shape[:2]
            sampled = (out[2].view(shape), out[3].view(shape), filters["temperature"])
        return dict(target=target, **given, sampled=sampled, kind=self.kind, rule=self.rule,
                    **self.target_filters, **self.options)  # fmt: skip

    def _draft(self, drafts, target):
        if self.form == "none":
            return dict(draft=None)
        rows = rows_after(self.q, drafts) if self.gamma else target[:, :0]
        if self.form == "narrow":
            return dict(draft=rows[..., : self.v - 1])
        if self.form == "mapped":
            columns = torch.full((self.v,), -1, dtype=torch.int32)
            columns[self.column_ids] = torch.arange(self.v - 1, dtype=torch.int32)
            return dict(draft=rows[..., self.column_ids], columns=columns)
        if self.form == "sparse":
            return self._sparse(rows_after(self.draft_probs, drafts).float())
        return dict(draft=rows)

    def _sparse(self, law):
        """The first id in two halves, a slot in between unused."""
        top = law.topk(2, -1)
        first, second = top.values.split(1, -1)
        a, b = top.indices.split(1, -1)
        return dict(
            draft=torch.cat([first / 2, torch.full_like(first, 0.3), second, first / 2], -1),
            ids=torch.cat([a, torch.full_like(a, -1), b, a], -1),
        )

    def verifier(self, name, change=lambda arguments: arguments):
        op = provider("verify_chain", name) if isinstance(name, str) else name

        def run(drafts, uniforms):
            arguments = change(self.arguments(drafts, name if isinstance(name, str) else "cpp"))
            out = verify(op, **{"tokens": drafts, "uniforms": uniforms, **arguments})
            assert not out[2].any()
            return out[0], out[1]

        return run

    def realized(self, name, steps=36, change=lambda arguments: arguments):
        like = (
            self.verifier(BOUNDARY_PROVIDER, change)
            if BOUNDARY_PROVIDER and name != BOUNDARY_PROVIDER
            else None
        )
        return testing.enumerate_distribution(
            self.verifier(name, change), self.draft_probs, self.target_probs, steps=steps, like=like
        )


def assert_joint_distribution(law, want, tolerance=TOLERANCE):
    """The joint law of the emitted tokens is `want`."""
    assert float(law.accepted.sum()) == pytest.approx(1, abs=1e-7)
    assert_close("P(y1, y2, ..)", law.joint, want, atol=tolerance)


def assert_target_distribution(law, setting, tolerance=TOLERANCE):
    """The joint law of the emitted tokens is the target's."""
    assert_joint_distribution(law, testing.joint_distribution(setting.target_probs), tolerance)


def assert_wrong_distribution(law, setting):
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_target_distribution(law, setting)


# What each rule does, by its formulas (ALGORITHMS section 1).


def accepted_count_distribution(setting, rule):
    """[gamma + 1] law of the accepted count: a sum over draft tuples of products of chances."""
    counts = torch.zeros(setting.gamma + 1, dtype=torch.float64)
    weights = testing.joint_distribution(setting.draft_probs)
    for drafts in weights.nonzero():
        x = tuple(drafts.tolist())
        p = [setting.target_probs[i][x[:i]] for i in range(len(x))]
        q = [setting.draft_probs[i][x[:i]] for i in range(len(x))]
        left = float(weights[x])
        if rule == "token":
            for i, token in enumerate(x):
                stands = min(1.0, float(p[i][token] / q[i][token]))
                counts[i] += left * (1 - stands)
                left *= stands
            counts[-1] += left
            continue
        for i, h in reversed(list(enumerate(block_accept_probs(p, q, x), 1))):
            counts[i] += left * h
            left *= 1 - h
        counts[0] += left
    return counts


def block_accept_probs(p, q, x):
    """h_1 .. h_gamma of rule block (ALGORITHMS section 1)."""
    c = [1.0]
    for i, token in enumerate(x):
        c.append(min(1.0, c[-1] * float(p[i][token] / q[i][token])))
    out = []
    for i in range(1, len(x)):
        common = float(torch.minimum(c[i] * p[i], q[i]).sum())
        out.append((c[i] - common) / (1 - common) if common < 1 - 1e-15 else 1.0)
    return [*out, c[-1]]


def chain_joint_distribution(accept, reject, p):
    """Joint law when row i accepts with mass accept[i] and says something with reject[i] instead.

    Tables [V] * (i + 1); the target goes on after a rejection.
    """

    def follow(table, rows):
        for row in rows:
            table = table.unsqueeze(-1) * row
        return table

    total, alive = 0, torch.ones((), dtype=torch.float64)
    for i, (a, r) in enumerate(zip(accept, reject, strict=True)):
        total = total + follow(alive.unsqueeze(-1) * r, p[i + 1 :])
        alive = alive.unsqueeze(-1) * a
    return total + follow(alive, p[len(accept) :])


def rejection_mass(accept, law):
    """The mass that was not accepted, spread by a law."""
    return (1 - accept.sum(-1, keepdim=True)) * law


def lenient_masses(p, q, lenience, of_token=False):
    accept = torch.minimum(q, p / lenience)
    left = (p - (1.0 if of_token else lenience) * q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return accept, rejection_mass(accept, torch.where(total > 0, left / total, p))


def typical_masses(p, q, epsilon, delta, unfiltered=None):
    h = -torch.special.xlogy(*[unfiltered if unfiltered is not None else p] * 2).sum(-1, True)
    accept = torch.where(p > (delta * (-h).exp()).clamp(max=epsilon), q, 0.0)
    return accept, rejection_mass(accept, p)


def lossy_joint_distribution(setting, parts, **given):
    made = [
        parts(p, q, **given)
        for p, q in zip(setting.target_probs, setting.draft_probs, strict=False)
    ]
    return chain_joint_distribution(
        [a for a, _ in made], [r for _, r in made], setting.target_probs
    )
