"""What to decide about weight versions: how to come to one, from whom, and what may go. Pure."""
