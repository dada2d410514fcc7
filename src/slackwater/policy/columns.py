"""Layout of the arrays that describe groups and their members to compiled code."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_MEMBERS = 16
MAX_ROLLOUT_NODES = 48

# Rows of a group's `work`; each column is a member. Phase lengths on the member's nodes; the bound
# on the mean iteration; the time left (budget) for the iterations left; how many iterations it
# makes per cycle of the group (rounds); the cap on each single iteration, infinite if the SLO sets
# none.
ROLL_S, TRAIN_S, SYNC_S, BOUND_S, BUDGET_S, LEFT, ROUNDS, CAP_S = range(8)
WORK_ROWS = 8
