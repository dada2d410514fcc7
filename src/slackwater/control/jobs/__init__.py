"""Jobs: the life of an owner's run, and the account of what it used."""
