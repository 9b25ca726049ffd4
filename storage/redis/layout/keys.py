"""The keys and values of a store in Redis.

All keys of a partition share a hash tag and so, in a cluster, a slot. A user belongs to one partition. TENANT is
percent-encoded, so the first "/" ends it. docs/reference/byte-formats.md says what others may rely on.

  PREFIX:meta                           hash    layout version, number of partitions, id of the archive if there is one,
                                                "generation:TAG" for every generation that ever had a state,
                                                "items:TENANT" for every tenant that has ever had a generation, has set
                                                values of items, has declared properties, has put scenarios, or has
                                                an audit log,
                                                "secret", 64 hex digits, created once
                                                "accepted", when an operator last accepted a loss of data, in ms
                                                "lost", missing entries whose loss is not accepted: the value that
                                                "accepted" had when this was noted, a space, and a JSON object,
                                                partition -> id of the newest missing entry; "meta" -> "" if these
                                                fields were missing, but logs existed
                                                "newest:17", the value that "accepted" had when this was noted, a space,
                                                and the id of the entry of partition 17 that was the newest about a
                                                second ago
  PREFIX:{p17}:seq                      string  number of entries ever added to the partition's log; never decreases
  PREFIX:{p17}:log                      stream  entry id SEQ-MS, MS being the time; one field: "e", JSON as in
                                                storage/state/record_encoding.py, or "x": an erased user, see
                                                `parse_erasure`, or empty: an entry of that user
  PREFIX:{p17}:head:TENANT/USER         string  see `Head`: SEQ of the user's newest entry, 16 digits; after trimming
                                                also SEQ through which to read the archive, 16 digits, and the
                                                newest time of a UUIDv7 among the trimmed ids, 10 digits of seconds;
                                                for a merged user: 42 digits, a merge mark and the other USER
  PREFIX:{p17}:aliases:TENANT/USER      set     USERs that were merged into this one, or are about to be
  PREFIX:{p17}:index:TENANT/USER        zset    the user's entries: 8 bytes of hash of the event id, with SEQ as score
  PREFIX:{p17}:state:TAG:TENANT/USER    string  SEQ of the newest folded entry, 16 digits; encoded state;
                                                expires if the store was opened with a time to live of states
  PREFIX:{p17}:properties               hash    TENANT/USER -> properties, in the format of items' properties
  PREFIX:{p17}:erasing                  zset    names of erasures whose entries may still have content in the log;
                                                score 1 if the scratch lacks it from its beginning on, otherwise 0
  PREFIX:{p17}:erased:NAME              zset    the index of the user that this erasure has erased
  PREFIX:{p17}:scratch                  stream  a copy of the log's first entries, which replaces the log when complete
  PREFIX:{p17}:aside:NAME               stream  entries logged by others under the numbers of archived ones, until
                                                `lisarec repair --accept-loss` has logged them again
  PREFIX:{items:TENANT}:version         string  number of times that values or codes of the tenant's items were set
  PREFIX:{items:TENANT}:changes         zset    item ids, with the version of their last change as score
  PREFIX:{items:TENANT}:title           hash    item id -> the value set last; the same for :categories, a JSON array,
                                                and :available, 0 or 1
  PREFIX:{items:TENANT}:properties      hash    item id -> a JSON object: name -> the JSON of the value, as a text
  PREFIX:{items:TENANT}:vectors         hash    item id -> its vector, see storage/items/vectors.py
  PREFIX:{items:TENANT}:vector-bytes    string  the size of each vector, while there are any
  PREFIX:{items:TENANT}:property-types  string  a JSON object, see `HeldProperties` in storage/records.py
  PREFIX:{items:TENANT}:scenarios       hash    name of a scenario -> its newest version
  PREFIX:{items:TENANT}:scenarios-revision  string  another value after every change of a scenario
  PREFIX:{items:TENANT}:scenario:NAME   list    the stored versions of a scenario, oldest first
  PREFIX:{items:TENANT}:audit           list    the audit log, oldest first; see AuditEntry in storage/items/audit.py
  PREFIX:{items:TENANT}:keys-seen       string  see KeysSeen there
  PREFIX:{items:TENANT}:code-changes    zset    JSON arrays [item id, TAG], with scores as in :changes
  PREFIX:{items:TENANT}:codes           hash    [item id, TAG] -> the remaining fields of `ItemCodes`, a JSON array
  PREFIX:{items:TENANT}:trends          zset    item ids, with their trends as scores, see storage/items/trends.py
  PREFIX:{items:TENANT}:trend-clock     string  position and the time of Redis's clock then, see `TrendClock` there
  PREFIX:{items:TENANT}:visitors        hash    item id -> its visitors of this half-life, see `with_visitor` there
  PREFIX:{items:TENANT}:order-counts    zset    names of `OrderStore`, with their trends as scores, as in :trends
  PREFIX:{items:TENANT}:order-clock     string  as in :trend-clock
  PREFIX:{items:TENANT}:tallies         hash    the tenant's counters, by name, a JSON array
  PREFIX:{calls:KEY}:cost               hash    number of a minute -> cost of this API key's calls then; expires
  PREFIX:{new-users:TENANT}:all         hash    number of an hour -> new users of the tenant then; expires
  PREFIX:{new-users:TENANT}:pages       hash    the same for its page keys, and behind :key:KEY for one API key
  PREFIX:experiment:TENANT              string  the tenant's experiment, if there is one
  PREFIX:generations                    hash    TAG -> name of its model directory
  PREFIX:live:TAG                       string  expires once no process serves or builds the generation
  PREFIX:active                         string  TAG, a space and name of the generation that every process must serve
                                                The last three keys are those of the tenant `main`; those of other
                                                tenants end in ":TENANT".

No SEQ is ever used twice. So an unchanged head means an unchanged log, even if the user was erased in between, and a
state is the fold of the log exactly if it begins with the head's SEQ.

The entries of a user's log above the head's second number are in the stream and the index, the others in the archive.
Trimming changes the head, so a commit based on the archive's previous content is rejected and decided again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple
from urllib.parse import quote, unquote
from zlib import crc32

from storage.errors import StorageError
from storage.records import MAIN_TENANT
from storage.state.generation import Generation

LAYOUT_VERSION = 5
UNUSED = (
    "no service has used the key prefix '{prefix}' yet: start one first, or correct LISAREC_REDIS_PREFIX or the URL's "
    "database; if Redis has lost its data, see 'Recover from lost data' in docs/how-to/operate/repair.md"
)
GENERATION_FIELD = "generation:"  # prefix of fields of PREFIX:meta, as are the next ones
ITEMS_FIELD = "items:"
NEWEST_FIELD = "newest:"
ALL_STATES = "state:"  # begins keys of partitions behind the hash tag, as does the next
ALL_ASIDE = "aside:"


class Keyspace:
    """The keys under one prefix."""

    def __init__(self, prefix: str, partitions: int) -> None:
        if not prefix or set(prefix) & set("{}") or partitions < 1:
            raise ValueError(f"a key prefix without braces and a partition are needed, not {prefix!r} and {partitions}")
        self.meta = f"{prefix}:meta"
        self.partitions = partitions
        self.prefix = prefix
        self._partitions = [self.partition(number) for number in range(partitions)]

    def generations(self, tenant: str) -> str:
        """Return the key of the tenant's generations."""
        return f"{self.prefix}:generations{_tenant_suffix(tenant)}"

    def active(self, tenant: str) -> str:
        """Return the key of the tenant's active generation."""
        return f"{self.prefix}:active{_tenant_suffix(tenant)}"

    def live(self, tenant: str, tag: bytes) -> str:
        """Return the key that exists while any process serves or builds the generation."""
        return f"{self.prefix}:live:{tag.hex()}{_tenant_suffix(tenant)}"

    def items(self, tenant: str) -> ItemKeys:
        """Return the keys of the tenant's items."""
        return _item_keys(f"{self.prefix}:{{items:{_encoded(tenant)}}}")

    def experiment(self, tenant: str) -> str:
        """Return the key of the tenant's experiment."""
        return f"{self.prefix}:experiment:{quote(tenant, safe='')}"

    def pattern(self, beginning: str) -> str:
        """Return the SCAN pattern of the keys of partitions that begin so behind the hash tag; see `begins_with`."""
        return f"{_escaped(self.prefix)}:{{p*}}:{beginning}*"

    def pattern_of_users(self, tenant: str) -> str:
        """Return the SCAN pattern of all keys of the tenant's users; see `user_of`."""
        return self.pattern(f"*:{quote(tenant, safe='')}/")

    def partition(self, number: int) -> str:
        """Return the prefix of the partition's keys, with the hash tag."""
        return f"{self.prefix}:{{p{number}}}"

    def log(self, partition: int) -> str:
        """Return the key of the partition's log."""
        return log_key(self.partition(partition))

    def seq(self, partition: int) -> str:
        """Return the key of the number of the newest entry in the partition's log."""
        return seq_key(self.partition(partition))

    def aside(self, partition: int, name: str) -> str:
        """Return the key of entries that were removed from the partition's log, to be logged again."""
        return f"{self.partition(partition)}:aside:{name}"

    def user(self, tenant: str, user_id: str) -> User:
        """Return the user with the partition of their keys; raise StorageError if the ids are not Unicode."""
        try:
            name = f"{_encoded(tenant)}/{user_id}"
            partition = crc32(name.encode()) % self.partitions
        except UnicodeEncodeError as exc:
            raise StorageError(f"an id cannot be stored: {exc}") from exc
        return User(self._partitions[partition], name)


def seq_key(partition: str) -> str:
    """Return the key of the number of the newest entry in the log of a partition, PREFIX:{p17}."""
    return f"{partition}:seq"


def log_key(partition: str) -> str:
    """Return the key of the log of a partition, PREFIX:{p17}."""
    return f"{partition}:log"


def scratch_key(partition: str) -> str:
    """Return the key of the copy that replaces the log of a partition, PREFIX:{p17}."""
    return f"{partition}:scratch"


def calls_key(prefix: str, api_key: str) -> str:
    """Return the key of what an API key's calls cost."""
    return f"{prefix}:{{calls:{api_key}}}:cost"


def new_users_key(prefix: str, tenant: str, part: str) -> str:
    """Return the key of the number of a tenant's new users, of this part of them: all, pages, or key:KEY."""
    return f"{prefix}:{{new-users:{quote(tenant, safe='')}}}:{part}"


def states_of(tenant: str, tag: bytes) -> str:
    """Return how the keys of the states of the tenant's generation begin behind the hash tag."""
    return f"{ALL_STATES}{tag.hex()}:{quote(tenant, safe='')}/"


def begins_with(beginning: str, key: str) -> bool:
    """Return whether a partition's key begins so behind the hash tag: a pattern also finds it within a user's id."""
    return key.partition("}:")[2].startswith(beginning)


def user_of(key: str) -> User:
    """Return the user whose head, index, aliases or state has this key."""
    partition, _, rest = key.partition("}:")
    kind, _, name = rest.partition(":")
    return User(f"{partition}}}", name.partition(":")[2] if f"{kind}:" == ALL_STATES else name)


def tag_of_state(key: str) -> str:
    """Return the tag, in hex, of the generation whose state has this key."""
    return key.partition(":state:")[2].partition(":")[0]


def erasing_key(partition: str) -> str:
    """Return the key of the unfinished erasures in a partition, PREFIX:{p17}."""
    return f"{partition}:erasing"


def erased_index_key(partition: str, erasure: str) -> str:
    """Return the key of the index of the entries that this erasure has erased."""
    return f"{partition}:erased:{erasure}"


@cache
def _encoded(tenant: str) -> str:
    return quote(tenant, safe="")


def _tenant_suffix(tenant: str) -> str:
    """Return the suffix of keys that existed before tenants had generations of their own: empty for `main`."""
    return "" if tenant == MAIN_TENANT else f":{quote(tenant, safe='')}"


def _escaped(text: str) -> str:
    """Return a pattern that matches exactly this text."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


class ItemKeys:
    """The keys of a tenant's items, all in one slot.

    prefix  PREFIX:{items:TENANT}
    """

    def __init__(self, prefix: str) -> None:
        self.version = f"{prefix}:version"
        self.changes = f"{prefix}:changes"
        # in the order of an ItemEntry's fields
        self.parts = tuple(f"{prefix}:{part}" for part in ("title", "categories", "available", "properties"))
        self.vectors = f"{prefix}:vectors"
        self.vector_bytes = f"{prefix}:vector-bytes"
        self.property_types = f"{prefix}:property-types"
        self.scenarios = f"{prefix}:scenarios"
        self.scenarios_revision = f"{prefix}:scenarios-revision"
        self.audit = f"{prefix}:audit"
        self.keys_seen = f"{prefix}:keys-seen"
        self.code_changes = f"{prefix}:code-changes"
        self.codes = f"{prefix}:codes"
        self.trends = f"{prefix}:trends"
        self.trend_clock = f"{prefix}:trend-clock"
        self.visitors = f"{prefix}:visitors"
        self.order_counts = f"{prefix}:order-counts"
        self.order_clock = f"{prefix}:order-clock"
        self.tallies = f"{prefix}:tallies"
        self._prefix = prefix

    def scenario(self, name: str) -> str:
        """Return the key of the versions of a scenario."""
        return f"{self._prefix}:scenario:{name}"


_item_keys = cache(ItemKeys)


class User(NamedTuple):
    """A user of a tenant, and the partition that contains their keys."""

    partition: str  # PREFIX:{p17}
    name: str  # TENANT/USER

    @property
    def tenant(self) -> str:
        """The tenant, decoded."""
        return unquote(self.name.partition("/")[0])

    @property
    def user_id(self) -> str:
        """The user's id within the tenant."""
        return self.name.partition("/")[2]

    @property
    def partition_number(self) -> int:
        """The number of the partition."""
        return int(self.partition.rpartition(":{p")[2].removesuffix("}"))

    @property
    def head(self) -> str:
        """Key of the user's head."""
        return f"{self.partition}:head:{self.name}"

    @property
    def id_index(self) -> str:
        """Key of the hashes of the user's event ids."""
        return f"{self.partition}:index:{self.name}"

    @property
    def properties(self) -> str:
        """Key of the properties of the partition's users."""
        return f"{self.partition}:properties"

    @property
    def aliases(self) -> str:
        """Key of the users who were merged into this one."""
        return f"{self.partition}:aliases:{self.name}"

    @property
    def seq(self) -> str:
        """Key of the number of the newest entry in the partition's log."""
        return seq_key(self.partition)

    @property
    def log(self) -> str:
        """Key of the partition's log."""
        return log_key(self.partition)

    def state(self, generation: Generation) -> str:
        """Return the key of the user's state of the generation."""
        return self.state_of_tag(generation.tag.hex())

    def state_of_tag(self, tag: str) -> str:
        """Return the key of the user's state of the generation with this tag, in hex."""
        return f"{self.partition}:state:{tag}:{self.name}"

    def states(self, generations: Sequence[Generation]) -> list[str]:
        """Return the keys of the user's states of the generations."""
        return [self.state(generation) for generation in generations]
