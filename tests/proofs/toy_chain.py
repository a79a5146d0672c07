"""Toy target and draft models over a few tokens, small enough to enumerate what a verifier emits.

`ToyChain` holds the models. `ToyChain.realized` runs a verifier on every tuple of drafts and every
cell of the uniforms in which its decision is the same, and gives the exact joint distribution of
the emitted tokens. The asserts below compare that with the target's, or with a rule's formula.
"""

import math

import pytest
import torch
from support.providers import provider, sample, verify

import proofs
from proofs import assert_close
from proofs.case import packed_bits

TOLERANCE = 1e-6
RATES = torch.tensor([0.75, 0.3])  # `synthetic_rates` of rule synthetic
# The slower providers are tried at the cell boundaries that this one has; see `like` in
# tests/proofs/enumeration.py.
BOUNDARY_PROVIDER = "cpp"


def logit_tables(generator, v, rows, scale=1.5, holes=False):
    """Float32 logits of the next token after each prefix: table i is [v] * (i + 1).

    holes: some entries are -inf.
    """
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
    """Float64 probabilities of each row of each table, after the filters."""
    return [
        torch.stack(
            [proofs.filtered_distribution(r, **filters) for r in t.reshape(-1, t.shape[-1])]
        ).view(t.shape)
        for t in logit_tables
    ]


def rows_after(tables, drafts):
    """[N, rows, V]: the rows that follow the prefixes of each of N draft tuples."""
    return torch.stack([t[tuple(drafts[:, :i].T)] if i else t.expand(len(drafts), -1)
                        for i, t in enumerate(tables)], 1)  # fmt: skip


def with_impossible(tables, ids):
    """The tables with -inf at some ids: an index of the last dimension, or a function of a table
    that gives a mask."""
    out = []
    for table in tables:
        t = table.clone()
        t[ids(t) if callable(ids) else (..., ids)] = -torch.inf
        out.append(t)
    return out


def with_impossible_where(tables, allowed, value=-torch.inf):
    """The tables with -inf, or another value, where a token is not allowed."""
    if allowed is None:
        return tables
    return [t.where(a, value) for t, a in zip(tables, allowed, strict=True)]


class Toy:
    """What toy chains and trees share: each has its `op`, how to call it, and `arguments`."""

    def statistics(self, rows, provider_name, bitmask=None):
        """`sampled` of draft rows [N, rows, V], by the `sample` of a provider."""
        filters = {"temperature": 1.0, **self.draft_filters}
        bitmask = None if bitmask is None else bitmask.flatten(0, 1)
        op = provider("sample", provider_name)
        out = sample(op, rows.flatten(0, 1), bitmask=bitmask, **filters)
        return *(x.view(rows.shape[:2]) for x in out[2:4]), filters["temperature"]

    def verifier(self, name, change=lambda arguments: arguments, outputs=slice(0, 2)):
        """A function of drafts and uniforms that gives these outputs of the op.

        name: a provider, or an implementation of the op.
        """
        op = provider(self.op, name) if isinstance(name, str) else name

        def run(drafts, uniforms):
            arguments = change(self.arguments(drafts, name if isinstance(name, str) else "cpp"))
            out = self.call(op, **{"tokens": drafts, "uniforms": uniforms, **arguments})
            self.check(out)
            return out[outputs]

        return run

    def boundaries(self, name, change):
        """A verifier for `like`, or None if `name` is it."""
        return None if name == BOUNDARY_PROVIDER else self.verifier(BOUNDARY_PROVIDER, change)


class ToyChain(Toy):
    """Tables of both models, and the arguments that `verify_chain` gets for a tuple of drafts.

    All tables are over one vocabulary; tokens that the target or the draft lacks are impossible.
    target_probs, draft_probs: the distributions of both models after each prefix.
    draft: the form in which the draft is given, as in `proofs.chain_case`. same: the draft model
    is the target. holes: some tokens are impossible. options: more keyword arguments of `verify`.
    mask: whose rows have a bitmask by prefix, "target" or "both"; entries not allowed are 9.
    """

    op, call = "verify_chain", staticmethod(verify)

    def __init__(self, v=3, gamma=2, *, seed=0, draft="full", kind="logits", dtype=torch.float32,
                 holes=False, same=False, rule="token", target_filters=None, draft_filters=None,
                 mask="", **options):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.v, self.gamma, self.kind, self.rule, self.options = v, gamma, kind, rule, options
        self.form, _, self.variant = draft.partition("-")
        self.draft = draft
        self.target_filters = target_filters or {}
        self.draft_filters = draft_filters or {}
        size = v + 1 if self.form == "wide" else v
        p = [t.to(dtype) for t in logit_tables(generator, size, gamma + 1, holes=holes)]
        q = p[:gamma] if same else logit_tables(generator, size, gamma, holes=holes)
        q = [t.to(dtype) for t in q]
        p = with_impossible(p, slice(v, None))
        # A mapped draft has a column for every id but 0, in falling order.
        self.column_ids = torch.arange(v - 1, 0, -1)
        if self.form == "narrow":
            q = with_impossible(q, slice(v - 1, None))
        elif self.form == "mapped":
            q = with_impossible(q, 0)
        elif self.form == "sparse":
            q = with_impossible(q, lambda t: t < t.topk(2, -1).values[..., 1:])
        self.allowed = self.draft_allowed = None
        if mask:
            tables = logit_tables(generator, v, gamma + 1, holes=True)
            self.allowed = [t > -torch.inf for t in tables]
        if mask == "both":
            self.draft_allowed = self.allowed[:gamma]
        temperature = {k: x for k, x in self.target_filters.items() if k == "temperature"}
        kept = with_impossible_where(p, self.allowed), with_impossible_where(q, self.draft_allowed)
        self.target_probs = distributions(kept[0], **self.target_filters)
        self.draft_probs = distributions(kept[1], **(self.draft_filters or temperature))
        if kind == "probs":
            p, q = ([t.float().softmax(-1) for t in x] for x in (p, q))
            logs = with_impossible_where([t.double().log() for t in p], self.allowed)
            self.target_probs = distributions(logs, **self.target_filters)
            self.draft_probs = [t.double() for t in q]
        if draft == "none":
            self.draft_probs = [torch.nn.functional.one_hot(t.argmax(-1), v).double() for t in q]
        self.p = with_impossible_where(p, self.allowed, 9.0)
        self.q = with_impossible_where(q, self.draft_allowed, 9.0)

    def arguments(self, drafts, provider_name):
        """Keyword arguments of `providers.verify` for these draft tuples."""
        target = rows_after(self.p, drafts)[..., : self.v]
        given, is_sampled = self._draft(drafts, target), "sampled" in (self.form, self.variant)
        for name, tables in (("bitmask", self.allowed), ("draft_bitmask", self.draft_allowed)):
            if tables is not None:
                given[name] = packed_bits(rows_after(tables, drafts))
        bitmask = given.get("draft_bitmask")
        sampled = self.statistics(given["draft"], provider_name, bitmask) if is_sampled else None
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

    def _sparse(self, probs):
        """A `SparseDraft` of two ids: the first listed twice with half its probability, and an
        unused entry in between."""
        top = probs.topk(2, -1)
        first, second = top.values.split(1, -1)
        a, b = top.indices.split(1, -1)
        return dict(
            draft=torch.cat([first / 2, torch.full_like(first, 0.3), second, first / 2], -1),
            ids=torch.cat([a, torch.full_like(a, -1), b, a], -1),
        )

    @staticmethod
    def check(out):
        assert not out[2].any()

    def realized(self, name, steps=36, change=lambda arguments: arguments):
        """The joint distribution of what a provider emits; `change` alters the arguments."""
        like = self.boundaries(name, change)
        return self.realized_by(self.verifier(name, change), steps=steps, like=like)

    def realized_by(self, run, **options):
        """What a function of drafts and uniforms emits, as `enumerate_distribution` measures it."""
        return proofs.enumerate_distribution(run, self.draft_probs, self.target_probs, **options)


def assert_joint_distribution(realized, want, tolerance=TOLERANCE):
    """The emitted tokens have the joint distribution `want`."""
    assert float(realized.accepted.sum()) == pytest.approx(1, abs=1e-7)
    assert_close("P(y1, y2, ..)", realized.joint, want, atol=tolerance)


def assert_target_distribution(realized, toy, tolerance=TOLERANCE):
    """The emitted tokens of a toy chain or tree have the joint distribution of the target."""
    assert_joint_distribution(realized, proofs.joint_distribution(toy.target_probs), tolerance)


def assert_wrong_distribution(realized, toy):
    """The emitted tokens do not have the target's distribution: for negative controls."""
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_target_distribution(realized, toy)


# The rules by their formulas (docs/rules.md), computed from the distributions alone.


def accepted_count_distribution(toy, rule):
    """[gamma + 1] probabilities of each number of accepted drafts, for rules token and block."""
    counts = torch.zeros(toy.gamma + 1, dtype=torch.float64)
    weights = proofs.joint_distribution(toy.draft_probs)
    for drafts in weights.nonzero():
        x = tuple(drafts.tolist())
        p = [toy.target_probs[i][x[:i]] for i in range(len(x))]
        q = [toy.draft_probs[i][x[:i]] for i in range(len(x))]
        undecided = float(weights[x])
        if rule == "token":
            for i, token in enumerate(x):
                accept = min(1.0, float(p[i][token] / q[i][token]))
                counts[i] += undecided * (1 - accept)
                undecided *= accept
            counts[-1] += undecided
            continue
        for i, h in reversed(list(enumerate(block_accept_probs(p, q, x), 1))):
            counts[i] += undecided * h
            undecided *= 1 - h
        counts[0] += undecided
    return counts


def block_accept_probs(p, q, x):
    """h_1 .. h_gamma of rule block (docs/rules.md#block)."""
    c = [1.0]
    for i, token in enumerate(x):
        c.append(min(1.0, c[-1] * float(p[i][token] / q[i][token])))
    out = []
    for i in range(1, len(x)):
        common = float(torch.minimum(c[i] * p[i], q[i]).sum())
        out.append((c[i] - common) / (1 - common) if common < 1 - 1e-15 else 1.0)
    return [*out, c[-1]]


# A lossy rule is described by two tables for each row: `accepted`, the mass with which it accepts
# each token, and `recovered`, the mass with which it rejects the draft and emits that token.


def chain_joint_distribution(accepted, recovered, p):
    """Joint distribution of the emitted tokens of a rule that decides draft by draft.

    accepted, recovered, p: tables [V] * (i + 1). The target continues after a rejection.
    """

    def continued(table, rows):
        for row in rows:
            table = table.unsqueeze(-1) * row
        return table

    total, reached = 0, torch.ones((), dtype=torch.float64)
    for i, (a, r) in enumerate(zip(accepted, recovered, strict=True)):
        total = total + continued(reached.unsqueeze(-1) * r, p[i + 1 :])
        reached = reached.unsqueeze(-1) * a
    return total + continued(reached, p[len(accepted) :])


def rejection_mass(accepted, probs):
    """The mass that was not accepted, distributed as `probs`."""
    return (1 - accepted.sum(-1, keepdim=True)) * probs


def lenient_masses(p, q, lenience):
    accepted = torch.minimum(q, p / lenience)
    residual = (p - lenience * q).clamp(min=0)
    total = residual.sum(-1, keepdim=True)
    return accepted, rejection_mass(accepted, torch.where(total > 0, residual / total, p))


def typical_masses(p, q, epsilon, delta):
    h = -torch.special.xlogy(p, p).sum(-1, True)
    accepted = torch.where(p > (delta * (-h).exp()).clamp(max=epsilon), q, 0.0)
    return accepted, rejection_mass(accepted, p)


def top_beta_masses(p, q, beta, tau):
    """Rule top_beta by pairwise comparisons."""
    likelier = (p.unsqueeze(-2) > p.unsqueeze(-1)).sum(-1)
    near = (p > 0) & (p.amax(-1, keepdim=True) <= p * math.exp(min(tau, 700.0)))
    accepted = torch.where(near & (likelier < beta), q, 0.0)
    return accepted, rejection_mass(accepted, p)


def lossy_joint_distribution(toy, masses, **parameters):
    """Joint distribution under a rule whose `masses(p, q, **parameters)` are given."""
    rows = zip(toy.target_probs, toy.draft_probs, strict=False)
    made = [masses(p, q, **parameters) for p, q in rows]
    return chain_joint_distribution([a for a, _ in made], [r for _, r in made], toy.target_probs)
