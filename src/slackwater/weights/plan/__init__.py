"""Who holds which slice of a model, who publishes which, and who fetches which. Pure."""
