"""The gain of speculative decoding: acceptance rates, expected tokens, walltime, best gamma.

P is the target's distribution and Q the draft's, the one that the drafts were really drawn from:
probabilities [..., V] of any floating dtype on any device. Sums and results are float64, and no
function of tensors waits for their device except `mean_accepted`, `acceptance_uniforms` and
`draw_uniforms`.
Formulas are those of Leviathan et al. 2023 (arXiv 2211.17192), section 3, unless said otherwise.
"""

from .acceptance import (
    acceptance_rate,
    accepted_mass,
    block_acceptance,
    divergence,
    lenient_argmax,
    mean_accepted,
    num_accepted_distribution,
    top_beta_set,
    typical_set,
)
from .baselines import (
    best_of_likeliest_tokens,
    best_of_tokens,
    rejection_acceptance,
    rejection_mass,
)
from .estimates import (
    AcceptanceEstimate,
    clustered_mean,
    wilson_interval,
)
from .leviathan import (
    LENIENCE_SPEEDS,
    LENIENCES,
    LENIENT_COST,
    TABLE_1,
    TABLE_3,
    TABLE_4,
    LenienceRow,
    Table1Row,
    Table3Row,
    Table4Row,
    fastest,
    lenience_speeds,
    table_1,
)
from .tree_acceptance import (
    first_children_acceptance,
    k_seq_factor,
    tree_acceptance,
    tree_acceptance_bound,
)
from .uniforms import acceptance_uniforms, draw_uniforms
from .walltime import (
    expected_tokens,
    improvement_bound,
    memory_accesses_factor,
    operations_factor,
    optimal_gamma,
    oracle_factor,
    walltime_factor,
)

__all__ = [
    "LENIENCES",
    "LENIENCE_SPEEDS",
    "LENIENT_COST",
    "TABLE_1",
    "TABLE_3",
    "TABLE_4",
    "AcceptanceEstimate",
    "LenienceRow",
    "Table1Row",
    "Table3Row",
    "Table4Row",
    "acceptance_rate",
    "acceptance_uniforms",
    "accepted_mass",
    "best_of_likeliest_tokens",
    "best_of_tokens",
    "block_acceptance",
    "clustered_mean",
    "divergence",
    "draw_uniforms",
    "expected_tokens",
    "fastest",
    "first_children_acceptance",
    "improvement_bound",
    "k_seq_factor",
    "lenience_speeds",
    "lenient_argmax",
    "mean_accepted",
    "memory_accesses_factor",
    "num_accepted_distribution",
    "operations_factor",
    "optimal_gamma",
    "oracle_factor",
    "rejection_acceptance",
    "rejection_mass",
    "table_1",
    "top_beta_set",
    "tree_acceptance",
    "tree_acceptance_bound",
    "typical_set",
    "walltime_factor",
    "wilson_interval",
]
