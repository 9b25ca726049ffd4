"""The route of the script that a shop's pages load to send events."""

from pathlib import Path

from fastapi.responses import Response

from app.http.access import NO_SCOPE
from app.http.routes.guarded_route import GuardedRouter

# in the repository as in an installation, a sibling of the package
SCRIPT = (Path(__file__).parents[3] / "clients" / "client.js").read_bytes()
HEADERS = {
    "Cache-Control": "public, max-age=3600",  # a corrected script reaches every page within an hour
    "X-Content-Type-Options": "nosniff",
    # pages of any shop may load it, also those that check its hash or isolate themselves
    "Access-Control-Allow-Origin": "*",
    "Cross-Origin-Resource-Policy": "cross-origin",
}

router = GuardedRouter()


@router.get("/client.js", include_in_schema=False, dependencies=[NO_SCOPE])
async def get_client() -> Response:
    """`clients/client.js`, which docs/how-to/integrate/browser.md describes."""
    return Response(SCRIPT, media_type="text/javascript", headers=HEADERS)
