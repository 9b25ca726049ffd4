"""Folders of files: directories of this machine, and prefixes of a bucket."""
