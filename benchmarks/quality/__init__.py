"""The quality of recommendations, and a check that the service is as good as the evaluation says."""
