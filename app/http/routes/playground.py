"""The playground: a page that shows one user's state and recommendations, live."""

from pathlib import Path

from fastapi import HTTPException
from fastapi.responses import FileResponse, RedirectResponse

from app.http.access import NO_SCOPE
from app.http.routes.guarded_route import GuardedRouter

STATIC = Path(__file__).parents[1] / "static"
PARTS = frozenset(path.name for path in STATIC.iterdir() if path.suffix in (".css", ".js"))
# Nothing loads from other origins, no inline script runs, and no page may frame this one.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

# The page reveals nothing about tenants. Its requests need the visitor's key if the service has keys.
router = GuardedRouter(dependencies=[NO_SCOPE], include_in_schema=False)


@router.get("/")  # the address that the server logs at startup
@router.get("/playground")
async def redirect_to_page() -> RedirectResponse:
    """Redirect to the address with a slash, which the relative links of the page need."""
    return RedirectResponse("playground/")


@router.get("/playground/")
async def get_page() -> FileResponse:
    """Return the page."""
    return FileResponse(STATIC / "playground.html", headers=HEADERS)


@router.get("/playground/{part}")
async def get_part(part: str) -> FileResponse:
    """Return a script or style sheet of the page."""
    if part not in PARTS:
        raise HTTPException(404)
    return FileResponse(STATIC / part, headers=HEADERS)
