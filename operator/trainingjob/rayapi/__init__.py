"""A client of the Ray dashboard: the Jobs API and the tail of log files."""
