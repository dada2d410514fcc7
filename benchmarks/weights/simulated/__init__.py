"""Weight versions over links in virtual time, under the weight director."""
