"""The users of the SQLite file: the writer thread, the checkpoint thread, and the open files."""
