"""Columns of the arrays in which groups and their members go into compiled code."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_MEMBERS = 16
MAX_ROLLOUT_NODES = 48

# Rows of a group's `work`, one column per member: phase lengths on the nodes that it has, the bound
# on one iteration, the time left for its iterations left, how many iterations it makes in the
# group's cycle, and the bound on each of them where its SLO is one on iterations (else infinite).
ROLL_S, TRAIN_S, SYNC_S, BOUND_S, BUDGET_S, LEFT, ROUNDS, CAP_S = range(8)
WORK_ROWS = 8
