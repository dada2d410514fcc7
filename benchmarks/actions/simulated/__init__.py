"""Actions in virtual time, with the broker and without: what the figures of `bench actions`
compare.
"""
