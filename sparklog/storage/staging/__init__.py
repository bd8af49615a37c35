"""Files of Spark batches, staged until a commit appends them."""
