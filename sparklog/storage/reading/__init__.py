"""Reading records: plans over tables and logs, and the slices of files that they name."""
