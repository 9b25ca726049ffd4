"""The interface of a Lua script."""

from collections.abc import Sequence
from hashlib import sha1

from storage.redis.connections.nodes import Argument, Command


class Script:
    """A Lua script, called by its hash."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    def command(self, keys: Sequence[str], args: Sequence[Argument]) -> Command:
        """Return the command that calls the script."""
        return Command(keys[0], ("EVALSHA", self.sha, len(keys), *keys, *args))
