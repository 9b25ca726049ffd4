"""Retraining, switching models and scaling under load."""
