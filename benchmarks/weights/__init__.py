"""Measurements of weight versions: the delta codec, and the ways that versions travel."""
