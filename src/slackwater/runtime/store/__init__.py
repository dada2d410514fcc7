"""What must survive a crash: the database, its logs, the state directory."""
