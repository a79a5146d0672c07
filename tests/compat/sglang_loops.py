"""What SGLang's kernels compute, one sequence at a time, and sampling parameters of its requests.

Trees are random ones of EAGLE's kind, or the literal example of SGLang's tests. Its files are
read and not imported, from the folder above `sglang/` that the environment variable SGLANG_SOURCE
names, such as an unpacked wheel, or else from an installed SGLang.
"""

import ast
import functools
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import torch

TOP_K_ALL = 1 << 30  # how SGLang writes that there is no top-k
LINKS = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
EXAMPLE = dict(
    candidates=torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]),
    retrieve_index=torch.tensor([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
    retrieve_next_token=torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]),
    retrieve_next_sibling=torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]),
)


def example_logits():
    """[2, 6, 20]: 10 at one token of each row, 1 elsewhere."""
    likeliest = torch.tensor([[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]])
    return 1 + 9 * torch.nn.functional.one_hot(likeliest, 20).float()


def outputs(b, n, s):
    """predicts, accept_index and accept_token_num as SGLang allocates them."""
    return dict(
        predicts=torch.full((b * n,), -1, dtype=torch.int32),
        accept_index=torch.full((b, s), -1, dtype=torch.int32),
        accept_token_num=torch.zeros(b, dtype=torch.int32),
    )


def links(b, n):
    return {name: torch.full((b, n), -1) for name in LINKS}


def descend(accepts, last_token, out, candidates, retrieve_index, retrieve_next_token,
            retrieve_next_sibling):  # fmt: skip
    """Goes down each tree.

    accepts: (sequence, node, child, its token, tokens rejected before) -> bool.
    last_token: (sequence, node, rejected tokens; None without room for a child) -> token.
    """
    for b, tokens in enumerate(candidates.tolist()):
        index = retrieve_index[b].tolist()
        node, path, rejected = 0, [index[0]], []
        while len(path) < out["accept_index"].shape[1]:
            child = int(retrieve_next_token[b, node])
            while child >= 0 and not accepts(b, node, tokens[child], rejected):
                rejected.append(tokens[child])
                child = int(retrieve_next_sibling[b, child])
            if child < 0:
                break
            out["predicts"][index[node]] = tokens[child]
            node, rejected = child, []
            path.append(index[node])
        room = len(path) < out["accept_index"].shape[1]
        out["predicts"][index[node]] = last_token(b, node, rejected if room else None)
        out["accept_index"][b, : len(path)] = torch.tensor(path)
        out["accept_token_num"][b] = len(path) - 1


def sample_down(out, tree, uniforms, final, probs, single=1.0, acc=1.0, draft_probs=None):
    """`tree_speculative_sampling_target_only` for siblings with different tokens.

    It leaves draft_probs as they are; None is zeros.
    """

    def accepts(b, node, token, rejected):
        row = probs[b, node]
        mass = torch.zeros(())
        for x in [*rejected, token]:
            mass = mass + row[x]
        return bool(uniforms[b, node] <= mass / max(acc, 1e-9)) or bool(row[token] >= single)

    def last_token(b, node, rejected):
        p = probs[b, node].double()
        residual = p.clone()
        if rejected is not None and draft_probs is not None:
            residual = (p - draft_probs[b, node]).clamp(min=0)
        residual[rejected or []] = 0
        residual = residual if residual.any() else p
        return int((residual.cumsum(0) <= final[b].double() * residual.sum()).sum())

    descend(accepts, last_token, out, **tree)


def eagle_tree(generator, b, topk, depth, n):
    """(parent_list, selected_index): the best n - 1 candidates by the product of their scores."""
    parents, scores = [torch.arange(-1, topk).expand(b, -1)], []
    frontier = torch.rand(b, topk, generator=generator)
    scores.append(frontier)
    for level in range(1, depth):
        children = frontier[..., None] * torch.rand(b, topk, topk, generator=generator)
        scores.append(children.flatten(1))
        frontier, best = children.flatten(1).topk(topk)
        parents.append(best + topk + topk * topk * (level - 1))
    selected = torch.cat(scores, 1).topk(n - 1).indices.sort().values
    return torch.cat(parents[:depth], 1)[:, : topk * (depth - 1) + 1], selected


def parents_of(parent_list, selected_index, topk):
    """[B][N], the parent of each node, one by one; -1 for the root."""
    out = []
    for row, chosen in zip(parent_list.tolist(), selected_index.tolist(), strict=True):
        wanted = [row[c // topk] if c // topk else None for c in chosen]
        out.append([-1, *(0 if w is None else chosen.index(w) + 1 for w in wanted)])
    return out


def linked(parents):
    """The three links of a batch of parents."""
    n = len(parents[0])
    children = [[[i for i in range(n) if row[i] == x] for x in range(n)] for row in parents]
    siblings = [
        [[j for j in range(i + 1, n) if row[j] == row[i] >= 0] for i in range(n)] for row in parents
    ]
    return {
        "retrieve_index": torch.arange(len(parents) * n).view(-1, n),
        "retrieve_next_token": torch.tensor([[[*c, -1][0] for c in row] for row in children]),
        "retrieve_next_sibling": torch.tensor([[[*s, -1][0] for s in row] for row in siblings]),
    }


def lineage(row, node):
    """A node and its ancestors, the root last."""
    return [node] if node == 0 else [node, *lineage(row, row[node])]


def random_tree(generator, b, n, v):
    """Candidates and links of random trees, and their parents; siblings have different tokens."""
    parents = [[-1, *(int(torch.randint(i, (1,), generator=generator)) for i in range(1, n))]
               for _ in range(b)]  # fmt: skip
    candidates = torch.randint(v, (b, n), generator=generator)
    for row, tokens in zip(parents, candidates, strict=True):
        for i in range(1, n):
            taken = {int(tokens[j]) for j in range(1, i) if row[j] == row[i]}
            tokens[i] = next(x % v for x in range(int(tokens[i]), 2 * v) if x % v not in taken)
    return dict(candidates=candidates, **linked(parents)), parents


def chain(b, n, v, generator):
    """Arguments of `chain_speculative_sampling_triton`; some probabilities are 0."""
    target, draft = (
        torch.randn(2, b, n, v, generator=generator)
        .masked_fill(torch.rand(2, b, n, v, generator=generator) < 0.2, -torch.inf)
        .softmax(-1)
    )
    drafts = draft[:, : n - 1].flatten(0, 1).multinomial(1, generator=generator).view(b, n - 1)
    return dict(
        candidates=torch.cat([torch.zeros(b, 1).long(), drafts], 1),
        retrieve_index=torch.arange(b * n).view(b, n),
        retrieve_next_token=torch.tensor([*range(1, n), -1]).expand(b, n),
        retrieve_next_sibling=torch.full((b, n), -1),
        uniform_samples=torch.rand(b, n, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(b, generator=generator),
        target_probs=target, draft_probs=draft[:, : n - 1].contiguous(),
        threshold_single=1.0, threshold_acc=1.0, deterministic=True,
    )  # fmt: skip


def sampling_info(b, cls=SimpleNamespace, **given):
    """What its steps read of a `SamplingBatchInfo`, or one itself."""
    rows = dict(temperatures=1.0, top_ks=TOP_K_ALL, top_ps=1.0, min_ps=0.0)
    others = {name: given.pop(name) for name in given.keys() - rows}
    values = {name: torch.as_tensor(x).expand(b).clone() for name, x in (rows | given).items()}
    values["temperatures"], values["top_ks"] = (
        values["temperatures"][:, None],
        values["top_ks"].int(),
    )
    greedy = values["top_ks"] <= 1
    flags = dict(
        is_all_greedy=bool(greedy.all()), is_any_greedy=bool(greedy.any()), vocab_size=0,
        need_top_p_sampling=True, need_top_k_sampling=True, need_min_p_sampling=True, device="cpu",
    )  # fmt: skip
    return cls(**values, **flags, **dict(sampling_seed=None) | others)


def expected(row, temperatures=1.0, top_ks=0, top_ps=1.0, min_ps=0.0):
    """P of a row, in the order of SGLang's sampler."""
    p = (row.double() / temperatures).softmax(-1)
    if top_ks:
        p = torch.where(p < p.sort().values[-top_ks], 0.0, p)
        p = p / p.sum()
    down = p.sort(descending=True)
    p[down.indices[down.values.cumsum(-1) - down.values >= top_ps]] = 0.0
    p[p < min_ps * p.max()] = 0.0
    return p / p.sum()


def source():
    """The folder `sglang`, or None."""
    if named := os.environ.get("SGLANG_SOURCE"):
        folder = Path(named) / "sglang"
        if not (folder / "version.py").is_file():
            raise FileNotFoundError(f"SGLANG_SOURCE must name a folder with sglang/, got {named}")
        return folder
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parent if spec and spec.origin else None


def path_of(module):
    return source().joinpath(*module.split(".")[1:]).with_suffix(".py")


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def arguments(module, function):
    """The names of a function of a module, or "nothing"."""
    found = [n for n in tree(path_of(module)).body if getattr(n, "name", None) == function]
    if not found:
        return "nothing"
    a = found[-1].args
    return " ".join(x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs))
