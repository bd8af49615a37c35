"""Avro values of records as columns: writer schemas, the rules, and compiled loops. No I/O."""
