"""What ran when: traces, statistics, reports."""
