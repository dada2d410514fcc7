"""The weight director: which versions exist, who holds, needs and pulls them, and which may go."""
