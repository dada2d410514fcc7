"""People's own code under permits: the decorators, the job they belong to, and its client (WEAVE
5.1).
"""
