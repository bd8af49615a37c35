"""Table maintenance: compaction, retention, and the removal of files that no version names."""
