"""The broker's figures, for Prometheus over HTTP and for `sparklog top`."""
