"""Model directories: how a trained model is written, read and verified."""
