"""`lisarec retrain`: a round, the loop of rounds, their report and their metrics."""
