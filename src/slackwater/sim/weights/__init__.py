"""Weight versions in virtual time: the weight director over models of links."""
