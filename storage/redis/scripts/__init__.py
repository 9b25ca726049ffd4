"""The Lua scripts that run in Redis, with their keys and arguments.

Every script accesses keys of one slot only, except COMMIT on a single server.
"""
