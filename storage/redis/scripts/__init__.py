"""The Lua scripts that run in Redis, and the keys and arguments that they take.

Every script touches the keys of one slot only, except COMMIT on a single server.
"""
