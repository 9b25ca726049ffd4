"""The route of the script that a shop's pages load to send events."""

from pathlib import Path

from fastapi.responses import Response

from app.http.access import NO_SCOPE
from app.http.routes.guarded_route import GuardedRouter

# a sibling of the package, both in the repository and in an installation
SCRIPT = (Path(__file__).parents[3] / "clients" / "client.js").read_bytes()
HEADERS = {
    "Cache-Control": "public, max-age=3600",  # a corrected script reaches every page within an hour
    "X-Content-Type-Options": "nosniff",
    # pages of any origin may load it, including those that use subresource integrity or cross-origin isolation
    "Access-Control-Allow-Origin": "*",
    "Cross-Origin-Resource-Policy": "cross-origin",
}

router = GuardedRouter()


@router.head("/client.js", include_in_schema=False, dependencies=[NO_SCOPE])  # caches and monitors ask so
@router.get("/client.js", include_in_schema=False, dependencies=[NO_SCOPE])
async def get_client() -> Response:
    """Return `clients/client.js`, which docs/how-to/integrate/browser.md describes."""
    return Response(SCRIPT, media_type="text/javascript", headers=HEADERS)
