"""`lisarec retrain`: one round, the loop around it, its report and its metrics."""
