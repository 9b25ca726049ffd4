"""lisarec from Python: train a model, ask it for lists, measure it.

    import lisarec

    lisarec.train("data/shop", "models/shop", epochs=5)
    with lisarec.load("models/shop") as shop:
        shop.recommend(["tea-2", "cup-1"], k=5, exclude_seen="all")
        shop.explain(["tea-2"], k=1)[0]["explanation"]
    lisarec.evaluate("models/shop", "data/shop")["metrics"]["hr_at_10_full"]

The lists are those of the service: the same code ranks them. `python -m lisarec` is the command line.
"""

from lisarec.measuring import EvaluationSettings, evaluate
from lisarec.recommender import Recommender, load
from lisarec.training import TrainSettings, train
from lisarec.wishes import Wishes

__all__ = ["EvaluationSettings", "Recommender", "TrainSettings", "Wishes", "evaluate", "load", "train"]
