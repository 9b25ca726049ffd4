"""What requests may say and what answers look like, one file for each resource."""
