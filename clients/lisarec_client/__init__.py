"""A client of lisarec in one folder: copy it into your project. It needs Python 3.11 or newer and httpx.

    lisarec = Client("https://recs.shop.example", key=KEY)         # AsyncClient in asyncio; one for each process
    answer = lisarec.recommendations("ann", k=5, fallback=["tea-2", "cup-1"])
    lisarec.event("ann", "tea-2", type="purchase", recommendation_id=answer.recommendation_id)

**Recommendations never fail and never take longer than their time-out**: when the service is away, slow or busy, the
answer is the fallback list, its `source` is "fallback" and the log says why.

**Events never wait.** `event` puts them into a bounded queue, which a thread sends in the background, in order, again
and again with the same ids until the service has them in its log. When the queue is full, `event` takes no more until
there is room: it gives None instead of an id, counts `dropped`, and the log says so. What was taken stays in the queue
until the service has it, or refuses it as invalid (`refused`), or the process ends: `close`, and the end of the
program, wait some seconds for the rest. `flush` says whether all of it is in the service's log.

Everything else (`user`, `undo`, `merge`, `erase`, and `call` for any other call) asks again until it is done or the
time is up; then it raises a `LisarecError`, whose `details` name what is wrong. `check` says at once, as when a program
starts, whether the address and the key are right.
"""

from .async_client import AsyncClient
from .client import Client
from .ids import new_event_id, visitor_in
from .outbox import Outbox
from .responses import LisarecError, Recommendations

__all__ = ["AsyncClient", "Client", "LisarecError", "Outbox", "Recommendations", "new_event_id", "visitor_in"]
