"""Folders of files: local directories, and prefixes of a bucket."""
