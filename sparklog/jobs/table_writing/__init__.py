"""The parts of the job `to_table`: rows of records, schemas, the Delta table, a run."""
