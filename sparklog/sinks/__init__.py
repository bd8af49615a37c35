"""The Spark sink: batch and streaming writes into topics, each batch exactly once."""
