"""Tensors on disk: one checked file format for trainer states and weight versions."""
