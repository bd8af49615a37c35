"""The broker's metrics, for Prometheus over HTTP and for `sparklog top`."""
