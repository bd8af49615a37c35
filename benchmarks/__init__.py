"""Comparisons of sparklog with a real Kafka and with Spark's Kafka connector.

They require the development dependencies, Java, and network access for the jars on the first run;
they are not part of the wheel. `sparklog bench` measures sparklog alone.
"""
