"""Numba as the first compiled function that is called leaves it, for processes that are forked."""

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
