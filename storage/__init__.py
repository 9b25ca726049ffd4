"""User states and the event log. Numpy and bytes only: this package never sees a tensor and never imports ``app`` or ``model``."""
