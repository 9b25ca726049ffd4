"""User states and the event log, in numpy and bytes: this package sees no tensor and imports no other one."""
