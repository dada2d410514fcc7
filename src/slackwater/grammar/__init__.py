"""Constrained output: compiles and checks grammars, and follows them token by token."""
