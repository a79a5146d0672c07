"""The gain of speculative decoding: acceptance rates, expected tokens, walltime, best gamma.

P is the target's distribution and Q the draft's, the one that the drafts were really drawn from:
probabilities [..., V] of any floating dtype on any device. Sums and results are float64, and no
function of tensors waits for their device except `mean_accepted`, `acceptance_uniforms` and
`draw_uniforms`.
Formulas are those of Leviathan et al. 2023 (arXiv 2211.17192), section 3, unless said otherwise.
"""

from specdec_kernels.analysis.acceptance import (
    acceptance_rate,
    accepted_mass,
    block_acceptance,
    mean_accepted,
    num_accepted_distribution,
    top_beta_set,
    typical_set,
)
from specdec_kernels.analysis.estimates import (
    AcceptanceEstimate,
    clustered_mean,
    wilson_interval,
)
from specdec_kernels.analysis.leviathan import LENIENCES, TABLE_1, Table1Row, table_1
from specdec_kernels.analysis.tree_acceptance import (
    k_seq_factor,
    tree_acceptance,
    tree_acceptance_bound,
)
from specdec_kernels.analysis.uniforms import acceptance_uniforms, draw_uniforms
from specdec_kernels.analysis.walltime import (
    expected_tokens,
    operations_factor,
    optimal_gamma,
    walltime_factor,
)

__all__ = [
    "LENIENCES",
    "TABLE_1",
    "AcceptanceEstimate",
    "Table1Row",
    "acceptance_rate",
    "acceptance_uniforms",
    "accepted_mass",
    "block_acceptance",
    "clustered_mean",
    "draw_uniforms",
    "expected_tokens",
    "k_seq_factor",
    "mean_accepted",
    "num_accepted_distribution",
    "operations_factor",
    "optimal_gamma",
    "table_1",
    "top_beta_set",
    "tree_acceptance",
    "tree_acceptance_bound",
    "typical_set",
    "walltime_factor",
    "wilson_interval",
]
