"""Bad inputs of `sample` and of the verifiers, each with the message that it must raise.

A row is (what to change in good arguments, the message). BUILD makes the arguments of an op, by
the names of `providers.sample`, `verify` and `verify_tree`.
"""

import torch
from support import forward_error_table, kv_error_table
from support.kv_error_table import f64, i64
from support.providers import sample, verify, verify_tree


def arguments_of(*arguments):
    """In place of an op: its arguments."""
    return arguments


def sample_args(**bad):
    good = dict(logits=torch.zeros(3, 7), seeds=i64(3), positions=i64(3), method="cdf")
    return sample(arguments_of, **good | bad)


def chain_args(**bad):
    good = dict(target=torch.zeros(3, 5, 7), tokens=i64(3, 4), seeds=i64(3), positions=i64(3))
    return verify(arguments_of, **good | bad)


def tree_args(**bad):
    good = dict(target=torch.zeros(3, 5, 7), tokens=i64(3, 4), parents=torch.full((3, 4), -1),
                seeds=i64(3), positions=i64(3), rule="multi_draft", max_depth=4)  # fmt: skip
    return verify_tree(arguments_of, **good | bad)


HUGE = torch.zeros(1, dtype=torch.int64).expand(2**40)  # holds no memory
Q, Q2 = torch.zeros(3, 4, 7), torch.zeros(3, 4, 2)
FILTERS = [  # rows of every op here
    (dict(temperature=-1.0), "temperature must be finite and at least 0, got -1"),
    (dict(temperature=float("nan")), "temperature must be finite and at least 0, got nan"),
    (dict(temperature=float("inf")), "temperature must be finite and at least 0, got inf"),
    (dict(temperature=torch.ones(2)), r"temperature must be \[3\], got \[2\]"),
    (dict(temperature=torch.ones(3, 1)), r"temperature must be \[3\], got \[3, 1\]"),
    (dict(temperature=f64(3)), "temperature must be float32, got float64"),
    (dict(top_k=-2), r"top_k must be at least 0 \(0 keeps every token\), got -2"),
    (dict(top_k=i64(3)), "top_k must be int32, got int64"),
    (dict(top_k=i64(4).int()), r"top_k must be \[3\], got \[4\]"),
    (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0"),
    (dict(top_p=1.5), r"top_p must be in \(0, 1\], got 1.5"),
    (dict(top_p=float("nan")), r"top_p must be in \(0, 1\], got nan"),
    (dict(top_p=torch.ones(3).half()), "top_p must be float32, got float16"),
    (dict(top_p=torch.ones(2)), r"top_p must be \[3\], got \[2\]"),
    (dict(min_p=-0.25), r"min_p must be in \[0, 1\], got -0.25"),
    (dict(min_p=1.0001), r"min_p must be in \[0, 1\], got 1.0001"),
    (dict(min_p=torch.zeros(1)), r"min_p must be \[3\], got \[1\]"),
    (dict(seeds=i64(2)), r"seeds must be \[3\], got \[2\]"),
    (dict(seeds=i64(3).short()), "seeds must be int32 or int64, got int16"),
    (dict(positions=i64(3, 1)), r"positions must be \[3\], got \[3, 1\]"),
    (dict(positions=torch.zeros(3)), "positions must be int32 or int64, got float32"),
]
SAMPLE = [
    *FILTERS,
    (dict(logits=torch.zeros(1, 1).expand(2**56, 1)),
     r"logits must leave the outputs \[R\] with less than 2\*\*56 entries, "
     r"got \[72057594037927936\]"),
    (dict(logits=torch.zeros(7)), r"logits must be \[R, V\], got \[7\]"),
    (dict(logits=torch.zeros(1, 3, 7)), r"logits must be \[R, V\], got \[1, 3, 7\]"),
    (dict(logits=f64(3, 7)), "logits must be float32, bfloat16 or float16, got float64"),
    (dict(logits=i64(3, 7)), "logits must be float32, bfloat16 or float16, got int64"),
    (dict(logits=torch.zeros(3, 0)),
     r"logits must have a vocabulary of 1 to 2147483647 entries, got \[3, 0\]"),
    (dict(logits=torch.zeros(7, 3).T),
     "logits must have a contiguous last dimension, got stride 3"),
    (dict(noise=3), r"noise must be in \[0, 2\], got 3"),
    (dict(method=2), r"method must be in \[0, 1\], got 2"),
    (dict(noise="shared"), "method must be gumbel when noise is shared, got cdf"),
]  # fmt: skip
CHAIN = [
    *FILTERS,
    (dict(kind=2), r"kind must be in \[0, 1\], got 2"),
    (dict(kind=-1), r"kind must be in \[0, 1\], got -1"),
    (dict(rule=8), r"rule must be in \[0, 7\], got 8"),
    (dict(rule=2**32), r"rule must be in \[0, 7\], got 4294967296"),
    (dict(tokens=i64(3)), r"draft_token_ids must be \[B, gamma\], got \[3\]"),
    (dict(tokens=torch.zeros(3, 4)), "draft_token_ids must be int32 or int64, got float32"),
    (dict(tokens=i64(3, 4).short()), "draft_token_ids must be int32 or int64, got int16"),
    (dict(tokens=HUGE.expand(2**20, 2**40)),
     r"draft_token_ids must leave the outputs \[B, gamma\] with less than 2\*\*56 entries, "
     r"got \[1048576, 1099511627776\]"),
    (dict(target=torch.zeros(3, 4, 7)),
     r"target must be \[B, gamma\+1, V\] = \[3, 5, V\], got \[3, 4, 7\]"),
    (dict(target=torch.zeros(2, 5, 7)),
     r"target must be \[B, gamma\+1, V\] = \[3, 5, V\], got \[2, 5, 7\]"),
    (dict(target=torch.zeros(15, 7)),
     r"target must be \[B, gamma\+1, V\] = \[3, 5, V\], got \[15, 7\]"),
    (dict(target_indptr=i64(4).int()),
     r"target must be \[R, V\] when target_indptr is given, got \[3, 5, 7\]"),
    (dict(target=torch.zeros(9, 7), target_indptr=i64(3).int()),
     r"target_indptr must be \[4\], got \[3\]"),
    (dict(target=torch.zeros(9, 7), target_indptr=i64(4).short()),
     "target_indptr must be int32 or int64, got int16"),
    (dict(target=f64(3, 5, 7)), "target must be float32, bfloat16 or float16, got float64"),
    (dict(target=torch.zeros(3, 5, 0)),
     r"target must have a vocabulary of 1 to 2147483647 entries, got \[3, 5, 0\]"),
    (dict(target=torch.zeros(3, 7, 5).mT),
     "target must have a contiguous last dimension, got stride 5"),
    (dict(draft=torch.zeros(3, 5, 7)),
     r"draft must be \[B, gamma, D\] = \[3, 4, D\], got \[3, 5, 7\]"),
    (dict(draft=torch.zeros(12, 7)),
     r"draft must be \[B, gamma, D\] = \[3, 4, D\], got \[12, 7\]"),
    (dict(target=torch.zeros(9, 7), target_indptr=i64(4).int(), draft=torch.zeros(7, 7)),
     r"draft must be \[R-B, D\] = \[6, D\], got \[7, 7\]"),
    (dict(draft=i64(3, 4, 7)), "draft must be float32, bfloat16 or float16, got int64"),
    (dict(draft=torch.zeros(3, 7, 4).mT),
     "draft must have a contiguous last dimension, got stride 4"),
    (dict(sampled=(f64(3, 4), None, 1.0)),
     "draft logsumexp and draft threshold must come together and with draft"),
    (dict(draft=Q, sampled=(None, torch.zeros(3, 4), 1.0)),
     "draft logsumexp and draft threshold must come together and with draft"),
    (dict(sampled=(f64(3, 4), torch.zeros(3, 4), 1.0)),
     "draft logsumexp and draft threshold must come together and with draft"),
    (dict(draft=Q, sampled=(f64(3, 5), torch.zeros(3, 4), 1.0)),
     r"draft logsumexp must be \[B, gamma\] = \[3, 4\], got \[3, 5\]"),
    (dict(draft=Q, sampled=(f64(3, 4), torch.zeros(4), 1.0)),
     r"draft threshold must be \[B, gamma\] = \[3, 4\], got \[4\]"),
    (dict(draft=Q, sampled=(torch.zeros(3, 4), torch.zeros(3, 4), 1.0)),
     "draft logsumexp must be float64, got float32"),
    (dict(draft=Q, sampled=(f64(3, 4), f64(3, 4), 1.0)),
     "draft threshold must be float32, got float64"),
    (dict(sampled=(None, None, -0.5)), "draft temperature must be finite and at least 0, got -0.5"),
    (dict(sampled=(None, None, torch.ones(4))), r"draft temperature must be \[3\], got \[4\]"),
    (dict(sampled=(None, None, f64(3))), "draft temperature must be float32, got float64"),
    (dict(uniforms=f64(3, 4)),
     r"uniforms must be \[B, gamma\+1\] = \[3, 5\], got \[3, 4\]"),
    (dict(uniforms=torch.zeros(3, 5)), "uniforms must be float64, got float32"),
    (dict(uniforms=f64(3, 5), rule="match"), "uniforms must be None when rule is match"),
    (dict(draft=torch.zeros(3, 4, 0)),
     r"draft must have a vocabulary of 1 to 2147483647 entries, got \[3, 4, 0\]"),
    (dict(draft=torch.zeros(3, 5, 2), ids=i64(3, 5, 2)),
     r"draft probabilities must be \[B, gamma, K\] = \[3, 4, K\], got \[3, 5, 2\]"),
    (dict(target=torch.zeros(9, 7), target_indptr=i64(4).int(), draft=Q2[0, :1], ids=i64(1, 2)),
     r"draft probabilities must be \[R-B, K\] = \[6, K\], got \[1, 2\]"),
    (dict(draft=torch.zeros(3, 4, 0), ids=i64(3, 4, 0)),
     r"draft probabilities must have K >= 1 entries, got \[3, 4, 0\]"),
    (dict(draft=f64(3, 4, 2), ids=i64(3, 4, 2)),
     "draft probabilities must be float32, bfloat16 or float16, got float64"),
    (dict(target=torch.zeros(2, 7), target_indptr=i64(4).int(), draft=torch.zeros(0, 7)),
     r"target must be \[R, V\] with R >= B = 3 when draft is \[R-B, D\], got \[2, 7\]"),
    (dict(target=torch.zeros(2, 7), target_indptr=i64(4).int(), draft=Q2[0, :0], ids=i64(0, 2)),
     r"target must be \[R, V\] with R >= B = 3 when draft is \[R-B, K\], got \[2, 7\]"),
    (dict(ids=i64(3, 4, 2)),
     r"draft ids must have the shape of the draft probabilities, None, got \[3, 4, 2\]"),
    (dict(draft=Q2, ids=i64(3, 4, 3)),
     r"draft ids must have the shape of the draft probabilities, \[3, 4, 2\], got \[3, 4, 3\]"),
    (dict(draft=Q2, ids=i64(12, 2)),
     r"draft ids must have the shape of the draft probabilities, \[3, 4, 2\], got \[12, 2\]"),
    (dict(draft=Q2, ids=i64(3, 4, 2).short()), "draft ids must be int32 or int64, got int16"),
    (dict(draft=Q2, ids=torch.zeros(3, 4, 2)), "draft ids must be int32 or int64, got float32"),
    (dict(draft=Q2, ids=i64(3, 4, 2), sampled=(f64(3, 4), torch.zeros(3, 4), 1.0)),
     "draft logsumexp and draft threshold must come together and with draft"),
    (dict(draft=Q, columns=i64(6).int()),
     r"draft_map columns must be \[7\], got \[6\]"),
    (dict(draft=Q, columns=i64(7)), "draft_map columns must be int32, got int64"),
    (dict(columns=i64(7).int()),
     "draft_map must be None unless draft holds rows over a vocabulary of its own"),
    (dict(draft=Q2, ids=i64(3, 4, 2), columns=i64(7).int()),
     "draft_map must be None unless draft holds rows over a vocabulary of its own"),
    (dict(lenience=0.0), r"lenience must be in \(0, 1\], got 0"),
    (dict(lenience=1.25), r"lenience must be in \(0, 1\], got 1.25"),
    (dict(lenience=float("nan")), r"lenience must be in \(0, 1\], got nan"),
    (dict(lenience=1e-46), r"lenience must be in \(0, 1\], got 0"),
    (dict(epsilon=-0.5), r"typical_epsilon must be in \[0, 1\], got -0.5"),
    (dict(epsilon=1.5), r"typical_epsilon must be in \[0, 1\], got 1.5"),
    (dict(epsilon=float("nan")), r"typical_epsilon must be in \[0, 1\], got nan"),
    (dict(delta=-1.0), "typical_delta must be finite and at least 0, got -1"),
    (dict(delta=float("inf")), "typical_delta must be finite and at least 0, got inf"),
    (dict(delta=float("nan")), "typical_delta must be finite and at least 0, got nan"),
    (dict(beta=0), "top_beta_rank must be at least 1, got 0"),
    (dict(tau=-0.5), "top_beta_distance must be at least 0, got -0.5"),
    (dict(tau=float("nan")), "top_beta_distance must be at least 0, got nan"),
    (dict(lenience=0.5), "lenience must be 1 unless rule is lenient, got 0.5"),
    (dict(lenience=0.5, rule="typical"), "lenience must be 1 unless rule is lenient, got 0.5"),
    (dict(epsilon=0.5), "typical_epsilon must be 0.09 unless rule is typical, got 0.5"),
    (dict(delta=0.0), "typical_delta must be 0.3 unless rule is typical, got 0"),
    (dict(beta=2), "top_beta_rank must be 1 unless rule is top_beta, got 2"),
    (dict(tau=0.5, rule="lenient"), "top_beta_distance must be 0 unless rule is top_beta, got 0.5"),
    (dict(rule="synthetic"),
     "synthetic_rates must be given with rule synthetic and with no other"),
    (dict(rates=torch.ones(4)),
     "synthetic_rates must be given with rule synthetic and with no other"),
    (dict(rule="synthetic", rates=torch.ones(5)),
     r"synthetic_rates must be \[4\], got \[5\]"),
    (dict(rule="synthetic", rates=f64(4)), "synthetic_rates must be float32, got float64"),
    (dict(eos_token_ids=i64(1, 1)), r"eos_token_ids must be \[E\], got \[1, 1\]"),
    (dict(eos_token_ids=torch.tensor(3)), r"eos_token_ids must be \[E\], got \[\]"),
    (dict(eos_token_ids=i64(2).short()), "eos_token_ids must be int32 or int64, got int16"),
    (dict(max_new_tokens=i64(4)), r"max_new_tokens must be \[3\], got \[4\]"),
    (dict(max_new_tokens=i64(3).short()), "max_new_tokens must be int32 or int64, got int16"),
]  # fmt: skip
# Rows whose messages are the same in verify_tree.
SAME = (
    "draft_map", "draft ids", "draft temperature", "draft logsumexp and",
    "draft logsumexp must be float64", "draft threshold must be float32", "draft must be float32",
    "draft must have", "target must be float32", "target must have",
    r"target must be \[R, V\] when", r"target_indptr must be \[4\]", "typical", "eos_token_ids",
    "max_new_tokens", "kind",
)  # fmt: skip
DRAFT_ROWS = i64(3, 4).int()
TREE = [
    *FILTERS,
    *((bad, m) for bad, m in CHAIN if m.startswith(SAME)),
    (dict(rule=9), r"rule must be in \[0, 8\], got 9"),
    (dict(tokens=i64(3)), r"tree tokens must be \[B, N\], got \[3\]"),
    (dict(tokens=torch.zeros(3, 4)), "tree tokens must be int32 or int64, got float32"),
    (dict(tokens=HUGE.expand(2**16, 2**40)),
     r"tree tokens must leave the outputs \[B, N\] with less than 2\*\*56 entries, "
     r"got \[65536, 1099511627776\]"),
    (dict(parents=i64(3, 5)), r"tree parents must be \[B, N\] = \[3, 4\], got \[3, 5\]"),
    (dict(parents=i64(12)), r"tree parents must be \[B, N\] = \[3, 4\], got \[12\]"),
    (dict(parents=i64(3, 4).short()), "tree parents must be int32 or int64, got int16"),
    (dict(target=torch.zeros(3, 4, 7)),
     r"target must be \[B, N\+1, V\] = \[3, 5, V\], got \[3, 4, 7\]"),
    (dict(target=torch.zeros(15, 7)),
     r"target must be \[B, N\+1, V\] = \[3, 5, V\], got \[15, 7\]"),
    (dict(draft=Q, draft_rows=i64(3, 5).int()),
     r"draft_rows must be \[B, N\] = \[3, 4\], got \[3, 5\]"),
    (dict(draft=Q, draft_rows=f64(3, 4)), "draft_rows must be int32 or int64, got float64"),
    (dict(draft=torch.zeros(12, 7)),
     r"draft must be \[B, N, D\] unless draft_rows is given, got two dimensions"),
    (dict(rule="k_seq"), "draft must be given when rule is k_seq, got None"),
    (dict(draft=torch.zeros(3, 5, 7)),
     r"draft must be \[B, N, D\] = \[3, 4, D\], got \[3, 5, 7\]"),
    (dict(draft=torch.zeros(2, 6, 7), draft_rows=DRAFT_ROWS),
     r"draft must be \[B, M, D\] = \[3, M, D\], got \[2, 6, 7\]"),
    (dict(draft=torch.zeros(7), draft_rows=DRAFT_ROWS),
     r"draft must be \[B, M, D\] = \[3, M, D\], got \[7\]"),
    (dict(draft=torch.zeros(3, 5, 2), ids=i64(3, 5, 2)),
     r"draft probabilities must be \[B, N, K\] = \[3, 4, K\], got \[3, 5, 2\]"),
    (dict(draft=torch.zeros(6, 0), ids=i64(6, 0), draft_rows=DRAFT_ROWS),
     r"draft probabilities must have K >= 1 entries, got \[6, 0\]"),
    (dict(draft=Q, sampled=(f64(3, 5), torch.zeros(3, 4), 1.0)),
     r"draft logsumexp must be \[B, N\] = \[3, 4\], got \[3, 5\]"),
    (dict(draft=Q, sampled=(f64(3, 4), torch.zeros(3, 5), 1.0), draft_rows=DRAFT_ROWS),
     r"draft threshold must be \[B, M\] = \[3, 4\], got \[3, 5\]"),
    (
        dict(
            draft=torch.zeros(6, 7), sampled=(f64(3, 4), torch.zeros(6), 1.0), draft_rows=DRAFT_ROWS
        ),
        r"draft logsumexp must be \[M\] = \[6\], got \[3, 4\]",
    ),
    (dict(uniforms=f64(3, 5)), r"uniforms must be \[B, 2N\+1\] = \[3, 9\], got \[3, 5\]"),
    (dict(uniforms=torch.zeros(3, 9)), "uniforms must be float64, got float32"),
    (dict(uniforms=f64(3, 9), rule="match"), "uniforms must be None when rule is match"),
    (dict(max_depth=-1), r"max_depth must be in \[0, N\] = \[0, 4\], got -1"),
    (dict(max_depth=5), r"max_depth must be in \[0, N\] = \[0, 4\], got 5"),
]  # fmt: skip

BUILD = {
    "sample": sample_args,
    "verify_chain": chain_args,
    "verify_tree": tree_args,
    **forward_error_table.BUILD,
    **kv_error_table.BUILD,
}
ROWS = {
    "sample": SAMPLE, "verify_chain": CHAIN, "verify_tree": TREE,
    **forward_error_table.ROWS,
    **kv_error_table.ROWS,
}  # fmt: skip
TABLE = [(op, bad, m) for op, rows in ROWS.items() for bad, m in rows]

# (op, the argument that stays on the CPU, what else to change, the start of the message)
DEVICES = [
    ("sample", "seeds", dict(seeds=i64(3)), "seeds must be on the device of logits"),
    ("sample", "top_p", dict(top_p=torch.ones(3)), "top_p must be on the device of logits"),
    ("verify_chain", "draft_token_ids", {}, "draft_token_ids must be on the device of target"),
    ("verify_chain", "draft", dict(draft=Q), "draft must be on the device of target"),
    ("verify_chain", "uniforms", dict(uniforms=f64(3, 5)),
     "uniforms must be on the device of target"),
    ("verify_chain", "draft_ids", dict(draft=Q2, ids=i64(3, 4, 2)),
     "draft ids must be on the device of target"),
    ("verify_chain", "draft_columns", dict(draft=Q, columns=i64(7).int()),
     "draft_map columns must be on the device of target"),
    ("verify_chain", "synthetic_rates", dict(rule="synthetic", rates=torch.ones(4)),
     "synthetic_rates must be on the device of target"),
    ("verify_chain", "eos_token_ids", dict(eos_token_ids=i64(2)),
     "eos_token_ids must be on the device of target"),
    ("verify_chain", "max_new_tokens", dict(max_new_tokens=i64(3)),
     "max_new_tokens must be on the device of target"),
    *kv_error_table.DEVICES,
    *forward_error_table.DEVICES,
    ("verify_tree", "tree_tokens", {}, "tree tokens must be on the device of target"),
    ("verify_tree", "parents", {}, "tree parents must be on the device of target"),
    ("verify_tree", "draft_rows", dict(draft=Q, draft_rows=i64(3, 4).int()),
     "draft_rows must be on the device of target"),
    ("verify_tree", "draft_logsumexp",
     dict(draft=Q, sampled=(f64(3, 4), torch.zeros(3, 4), 1.0)),
     "draft logsumexp must be on the device of target"),
    ("verify_tree", "uniforms", dict(uniforms=f64(3, 9)),
     "uniforms must be on the device of target"),
]  # fmt: skip


def message_of(op, args):
    """The first line of the error that a call raises."""
    try:
        op(*args)
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    return "no error"
