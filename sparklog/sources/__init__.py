"""The Spark source: batch and streaming reads of topics, from nothing but the root."""
