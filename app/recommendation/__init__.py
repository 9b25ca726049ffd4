"""From a request for recommendations to the list that answers it."""
