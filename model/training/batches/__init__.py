"""The batches of an epoch: positions of histories with their states, or padded segments of histories."""
