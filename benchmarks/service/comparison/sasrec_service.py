"""The service that a user would otherwise write: FastAPI, a SASRec in torch, an index of FAISS, histories in Redis.

    SASREC_DIRECTORY=... SASREC_INDEX=flat SASREC_REDIS_URL=redis://... \\
        uvicorn --factory benchmarks.service.comparison.sasrec_service:create_app --workers 2
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import faiss
import numpy as np
import orjson
import torch
from fastapi import FastAPI, Response
from redis.asyncio import Redis

from benchmarks.service.comparison.sasrec import WINDOW, with_random_weights

Index = Literal["flat", "hnsw"]
DIRECTORY, INDEX, REDIS_URL = "SASREC_DIRECTORY", "SASREC_INDEX", "SASREC_REDIS_URL"
VECTORS = "vectors.npy"


def history_key(user_id: str) -> str:
    """Return the key of the list with the rows of the user's items, oldest first."""
    return f"history:{user_id}"


def index_path(directory: Path, kind: Index) -> Path:
    """Return the file of the index."""
    return directory / f"{kind}.faiss"


def build_indexes(directory: Path, links: int, breadth: int) -> None:
    """Build both indexes of the vectors in the directory.

    links    HNSW's M, and half of its links in the lowest layer
    breadth  HNSW's efConstruction and efSearch
    """
    vectors = np.load(directory / VECTORS)
    hnsw = faiss.IndexHNSWFlat(vectors.shape[1], links, faiss.METRIC_INNER_PRODUCT)
    hnsw.hnsw.efConstruction = hnsw.hnsw.efSearch = breadth
    indexes: dict[Index, faiss.Index] = {"flat": faiss.IndexFlatIP(vectors.shape[1]), "hnsw": hnsw}
    for kind, index in indexes.items():
        index.add(vectors)
        faiss.write_index(index, str(index_path(directory, kind)))


def create_app() -> FastAPI:
    """Return the app of one process."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    directory = Path(os.environ[DIRECTORY])
    model = with_random_weights(torch.from_numpy(np.load(directory / VECTORS)))
    index = faiss.read_index(str(index_path(directory, os.environ[INDEX])))  # type: ignore[arg-type]
    item_ids = [f"item-{row}" for row in range(index.ntotal)]
    redis = Redis.from_url(os.environ[REDIS_URL], decode_responses=True)
    app = FastAPI()

    @app.get("/readyz")
    async def ready() -> Response:
        return Response()

    @app.get("/v1/users/{user_id}/recommendations")
    async def recommend(user_id: str, k: int = 10) -> Response:
        """Recommend k items that the user's newest items do not contain."""
        rows = [int(row) for row in await redis.lrange(history_key(user_id), -WINDOW, -1)]
        items = []
        if rows:
            with torch.inference_mode():
                queries = model(torch.tensor([rows])).numpy()
            (scores,), (found,) = index.search(queries, k + len(rows))
            ranked = zip(found.tolist(), scores.tolist(), strict=True)
            items = [{"item_id": item_ids[row], "score": score} for row, score in ranked if row not in rows][:k]
        return Response(orjson.dumps({"user_id": user_id, "items": items}), media_type="application/json")

    return app
