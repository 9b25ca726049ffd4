"""Work on the whole log of any store: backing it up, restoring it, folding it for another generation."""
