"""MovieLens-100k: a recommender, private for each user."""
