"""The scripts that a store loads into its servers; the archiver uses TRIM."""

from storage.redis.scripts.audit import APPEND_AUDIT
from storage.redis.scripts.corrections import APPEND, ERASE, MARK_MERGE, NOTE_ALIAS, REPAIR, REWRITE_LOG, SET_ASIDE
from storage.redis.scripts.events import COMMIT, READ_LOG, SAVE_STATE
from storage.redis.scripts.items import (
    ADD_ORDER_COUNTS,
    ADD_TALLIES,
    ADD_VISITS,
    DECLARE_TYPES,
    PUT_ITEM_CODES,
    PUT_ITEMS,
    READ_ITEM_PROPERTIES,
    READ_ITEMS,
)
from storage.redis.scripts.scenarios import ADD_SCENARIO_VERSION
from storage.redis.scripts.user_properties import PUT_USER_PROPERTIES, READ_USER_PROPERTIES

STORE_SCRIPTS = (
    *(COMMIT, SAVE_STATE, READ_LOG, ERASE, REWRITE_LOG, APPEND, MARK_MERGE, NOTE_ALIAS, REPAIR, SET_ASIDE),
    *(DECLARE_TYPES, PUT_ITEMS, READ_ITEM_PROPERTIES, PUT_ITEM_CODES, READ_ITEMS),
    *(ADD_VISITS, ADD_TALLIES, ADD_ORDER_COUNTS),
    *(PUT_USER_PROPERTIES, READ_USER_PROPERTIES, ADD_SCENARIO_VERSION, APPEND_AUDIT),
)
