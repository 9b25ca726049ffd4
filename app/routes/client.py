"""The script that a shop's pages load to send their events."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from app.access import OPEN

# beside the rooms in the repository and in an installation alike
SCRIPT = (Path(__file__).parents[2] / "clients" / "client.js").read_bytes()
HEADERS = {
    "Cache-Control": "public, max-age=3600",  # so that a corrected script is everywhere within an hour
    "X-Content-Type-Options": "nosniff",
    # a page of any shop may load it, also one that checks its hash or isolates itself
    "Access-Control-Allow-Origin": "*",
    "Cross-Origin-Resource-Policy": "cross-origin",
}

router = APIRouter()


@router.get("/client.js", include_in_schema=False, dependencies=[OPEN])
async def get_client() -> Response:
    """`clients/client.js`, which docs/clients.md describes."""
    return Response(SCRIPT, media_type="text/javascript", headers=HEADERS)
