"""Values of records as columns: DDL, the rules of JSON, and columns derived from bytes. No I/O."""
