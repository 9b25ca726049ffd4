"""What has the SQLite file open: the thread that writes, the one that makes checkpoints, and the files themselves."""
