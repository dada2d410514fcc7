"""Where state lives, and what a switch costs."""
