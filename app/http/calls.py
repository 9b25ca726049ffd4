"""The calls that the routes and the fast path share: each charges its caller, then does what a parsed body asks for."""

from functools import partial

from app.errors import TooManyEvents
from app.events.new_users import ANYBODY, Sender
from app.http.access import Caller
from app.http.services import Services
from app.schemas.events import EventCounts


async def append_events(services: Services, caller: Caller, body: object) -> EventCounts:
    """Charge the caller for each event, and log and fold them.

    raises  TooManyEvents, TooManyRequests  when the caller may not send so many, and as `Ingest.append`
    """
    ingest, key = services.by_tenant[caller.tenant].ingest, caller.key
    if key is None:
        return await ingest.append(body, ANYBODY)
    events = len(body) if isinstance(body, list) else 1
    rate = key.requests_per_minute
    if rate is not None and events > rate:
        raise TooManyEvents(f"this key may send {rate:,} events a minute; nothing was applied, split the request")
    if events > 1:
        await services.rate_limiter.count(key, events - 1)  # one was counted with the request
    count = partial(services.rate_limiter.count_new_users, key, services.settings.new_users_per_hour)
    return await ingest.append(body, Sender(key.is_public, count))
