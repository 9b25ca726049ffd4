"""Oracle for undo and merge: users as joined lists with deletions, independent of ``storage``.

Who becomes another user hands over their list, entry by entry, and is from then on a name of that user. An entry keeps
the name and the id that it was posted with, which is what tells a resend.
"""

from dataclasses import dataclass, field, replace

from storage.state.event import Event
from storage.state.generation import Generation
from tests.storage.oracles.naive_fold import assert_state_is, fold


class Refused(Exception):
    pass


@dataclass
class NaiveEntry:
    event: Event  # as it was posted
    is_undone: bool = False

    @property
    def name(self) -> tuple[str, str]:
        return self.event.user_id, self.event.event_id


@dataclass
class NaiveUsers:
    logs: dict[str, list[NaiveEntry]] = field(default_factory=dict)
    became: dict[str, str] = field(default_factory=dict)

    def who(self, user_id: str) -> str:
        return self.who(self.became[user_id]) if user_id in self.became else user_id

    def log(self, user_id: str) -> list[NaiveEntry]:
        return self.logs.setdefault(self.who(user_id), [])

    def post(self, event: Event) -> bool:
        """Add an event; return whether it is new."""
        log = self.log(event.user_id)
        if any(entry.name == (event.user_id, event.event_id) for entry in log):
            return False
        log.append(NaiveEntry(event))
        return True

    def undo(self, user_id: str, event_id: str) -> bool | None:
        """Undo an event; return whether it counted, or None if it is unknown."""
        for entry in self.log(user_id):
            if entry.name == (user_id, event_id):
                was_undone, entry.is_undone = entry.is_undone, True
                return not was_undone
        return None

    def merge(self, user_id: str, visitor: str) -> bool:
        target = self.who(user_id)
        if target == visitor or self.who(visitor) not in (visitor, target):
            raise Refused
        if self.who(visitor) == target:
            return False
        self.log(target).extend(self.logs.pop(visitor, []))
        self.became[visitor] = target
        return True

    def erase(self, user_id: str) -> None:
        target = self.who(user_id)
        names = {name for name in self.became if self.who(name) == target}
        self.logs.pop(target, None)
        self.became = {name: whom for name, whom in self.became.items() if name not in names}

    def counted(self, user_id: str) -> list[Event]:
        """Events that the user's state is folded from, with ids made distinct like those of merged users."""
        return [replace(entry.event, event_id=f"{entry.name}") for entry in self.log(user_id) if not entry.is_undone]

    def assert_state_is(self, value: bytes | None, user_id: str, generation: Generation) -> None:
        counted = self.counted(user_id)
        if counted or not self.log(user_id):
            assert_state_is(value, fold(generation, counted))
        else:
            assert value is not None
            assert value == generation.encode(generation.empty())
