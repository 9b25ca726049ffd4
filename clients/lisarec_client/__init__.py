"""The Python client of the lisarec recommendation service. It needs Python 3.11 or newer and httpx.

    lisarec = Client("https://recs.shop.example", key=KEY)  # one per process; in asyncio use AsyncClient
    answer = lisarec.recommendations("ann", k=5, fallback=["tea-2", "cup-1"])
    lisarec.event("ann", "tea-2", type="purchase", recommendation_id=answer.recommendation_id)

**Recommendations never raise and never exceed their timeout.** If the service is down, slow or overloaded, you get the
fallback list: `source` is "fallback", and the log gives the reason.

**Events never block.** `event` adds the event to a bounded queue and returns. A background thread sends the queue in
order, and retries with the same event ids until the service has logged them. If the queue is full, `event` drops the
event, returns None instead of an id, increments `outbox.dropped` and logs an error. A queued event leaves the queue
when the service logs it, or rejects it as invalid (`outbox.refused`). `close` and interpreter exit wait up to ten
seconds for the rest. `flush` returns whether the service has logged everything.

All other methods (`user`, `undo`, `merge`, `erase`, and `call` for any other endpoint) retry for up to ten seconds, and
then raise a `LisarecError`, whose `details` name the invalid fields. Call `check` at startup: it raises at once if the
URL or the key is wrong.
"""

from .async_client import AsyncClient
from .client import Client
from .ids import new_event_id, visitor_in
from .outbox import Outbox
from .responses import LisarecError, Recommendations

__all__ = ["AsyncClient", "Client", "LisarecError", "Outbox", "Recommendations", "new_event_id", "visitor_in"]
