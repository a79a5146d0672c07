"""Rules that a user may write: right ones, and ones that are wrong on purpose."""

import torch


def one_hot(row, token):
    return torch.zeros_like(row).index_fill(0, token, 1.0)


def chain_rule(accepts=lambda u, p, q: u * q < p, residual=lambda p, q: (p - q).clamp(min=0)):
    """Rule token, or one with another acceptance or another residual."""

    def token_rule(P, Q, tokens, uniforms):
        for i, token in enumerate(tokens):
            q = one_hot(P[i], token) if Q is None else Q[i]
            if not accepts(uniforms[i], P[i, token], q[token]):
                weights = residual(P[i], q) + 1e-30
                return i, weights / weights.sum()
        return len(tokens), P[-1]

    return token_rule


token_rule = chain_rule()


def block_rule(P, Q, tokens, uniforms):
    """Rule block."""
    size = len(tokens)
    Q = torch.stack([one_hot(P[0], t) for t in tokens]) if Q is None else Q
    c = [1.0]
    for i, token in enumerate(tokens):
        c.append(min(1.0, c[-1] * float(P[i, token] / Q[i, token])))
    for i in range(size, 0, -1):
        h = c[i]
        if i < size:
            above, below = ((c[i] * P[i] - Q[i]) * s for s in (1, -1))
            h = min(1.0, float(above.clamp(min=0).sum() / below.clamp(min=0).sum()))
        if uniforms[i - 1] < h:
            break
    else:
        i = 0
    weights = P[i] if i == size else (c[i] * P[i] - Q[i]).clamp(min=0)
    return i, weights / weights.sum()


def greedy_rule(P, Q, tokens, uniforms):
    """Rule greedy, which is lossless for greedy calls alone."""
    best = P.argmax(dim=-1)
    accepted = int((best[:-1] == tokens).long().cumprod(0).sum())
    return accepted, one_hot(P[0], best[accepted])


def multi_draft_rule(P, Q, tokens, uniforms, parents, residual=True):
    """Rule multi_draft; without the residual of rejected siblings it is wrong."""
    path, node = [], -1
    while True:
        p = P[node + 1]
        for child in (parents == node).nonzero().flatten().tolist():
            token = tokens[child]
            q = one_hot(p, token) if Q is None else Q[child]
            if uniforms[child] * q[token] < p[token]:
                node = child
                path.append(child)
                break
            if residual:
                p = (p - q).clamp(min=0)
                p = p / p.sum()
        else:
            return path, p


def no_tree_residual(P, Q, tokens, uniforms, parents):
    return multi_draft_rule(P, Q, tokens, uniforms, parents, residual=False)


def always(P, Q, tokens, uniforms):
    return len(tokens), P[-1]


# Each of them must be rejected.
WRONG = {
    "P in place of the residual": chain_rule(residual=lambda p, q: p),
    "min(1, Q / P)": chain_rule(accepts=lambda u, p, q: u * p < q),
    "Q ignored": chain_rule(accepts=lambda u, p, q: u < p),
    "always accepted": always,
    "accepted 1 % too often": chain_rule(accepts=lambda u, p, q: u * q < 1.01 * p),
}
