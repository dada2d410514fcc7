"""The weight director: which versions exist, who holds and who needs them, what is on its way, what
may go.
"""
