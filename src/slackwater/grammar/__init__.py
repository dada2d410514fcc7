"""Constrained output: grammars compiled, checked, and followed token by token."""
