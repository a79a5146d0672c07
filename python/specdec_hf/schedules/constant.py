"""Always the same draft length."""

from __future__ import annotations

import numpy as np

from specdec_hf.schedules.base import Lengths, Schedule


class ConstantSchedule(Schedule):
    """``num_assistant_tokens`` in every round."""

    name = "constant"
    trees = True

    def lengths(self, most: Lengths) -> Lengths:
        return np.minimum(self.context.num_assistant_tokens, most)
