"""The command line `lisarec`: one module for each group of commands."""
