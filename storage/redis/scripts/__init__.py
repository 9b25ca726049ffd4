"""The Lua scripts that run in Redis, and the keys and arguments that they take.

Every script touches the keys of one slot only, except COMMIT on a single server.
"""

from storage.redis.scripts.corrections import APPEND, ERASE, MARK_MERGE, REPAIR, REWRITE_LOG
from storage.redis.scripts.events import COMMIT, READ_LOG, SAVE_STATE
from storage.redis.scripts.items import ADD_TALLIES, ADD_VISITS, PUT_ITEM_CODES, PUT_ITEMS, READ_ITEMS

# TRIM is the archiver's.
LOG_SCRIPTS = (COMMIT, SAVE_STATE, READ_LOG, ERASE, REWRITE_LOG, APPEND, MARK_MERGE, REPAIR)
STORE_SCRIPTS = (*LOG_SCRIPTS, PUT_ITEMS, PUT_ITEM_CODES, READ_ITEMS, ADD_VISITS, ADD_TALLIES)
