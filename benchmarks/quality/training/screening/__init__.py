"""A screening of ideas for the model on one GPU, on validation events alone."""
