"""What to decide: a view goes in, a decision comes out. Pure; one decision per file."""
